#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/checkpoint/stateful.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {
class World;
}

namespace tessera::observe {

/// How the values of several ranks become one.
enum class Reduction : std::uint8_t { kSum, kMin, kMax };

/// A number that is gathered over many steps, each rank's part on that rank, as torchmetrics' class
/// of this name. A checkpoint holds each rank's part (checkpoint::StateDict::rank_states). One of
/// your own:
///
///   class Accuracy final : public observe::Metric {
///    public:
///     void update(double right, double seen) {
///       check_update();
///       right_ += right;
///       seen_ += seen;
///     }
///     double compute() const override { return right_ / seen_; }
///
///    private:
///     double& right_ = add_state("right", 0, observe::Reduction::kSum);
///     double& seen_ = add_state("seen", 0, observe::Reduction::kSum);
///   };
///
/// Thread safety: one thread at a time.
class Metric : public checkpoint::RankState {
 public:
  Metric() = default;
  Metric(const Metric&) = delete;
  Metric& operator=(const Metric&) = delete;

  /// Over this rank's data since reset(); between sync() and unsync() over all ranks' data.
  virtual double compute() const = 0;
  /// Makes the values those of all ranks, until unsync(). A world of one does nothing for it.
  /// Collective over `world`. Throws Error if they are so already.
  void sync(comm::World& world);
  /// Makes the values this rank's own again. Throws Error if they are.
  void unsync();
  bool synced() const { return synced_; }

  /// Whether checkpoints have it: set_persistent(false) leaves it out.
  bool persistent() const override { return persistent_; }
  void set_persistent(bool persistent) { persistent_ = persistent; }

  /// This rank's own, also between sync() and unsync().
  nlohmann::json state_dict() const override;
  void load_state_dict(const nlohmann::json& state) override;
  nlohmann::json merged(const std::vector<nlohmann::json>& of_ranks) const override;
  void reset() override;

 protected:
  /// A value that update() changes. The reference stays valid. Throws Error for a name used
  /// twice, and a sum that does not begin at 0.
  double& add_state(const std::string& name, double initial, Reduction reduction);
  /// To be called by update(). Throws Error between sync() and unsync().
  void check_update() const;

 private:
  struct Value {
    double value;
    double initial;
    Reduction reduction;
  };
  void set_values(const nlohmann::json& state);

  std::map<std::string, Value> values_;
  nlohmann::json own_;  ///< what unsync() goes back to; null: what values_ has
  bool synced_ = false;
  bool persistent_ = true;
};

/// The mean of values, each of some weight: of losses, by tokens.
class MeanMetric final : public Metric {
 public:
  void update(double value, double weight = 1);
  /// NaN if there were none.
  double compute() const override;

 private:
  double& sum_ = add_state("sum", 0, Reduction::kSum);
  double& weight_ = add_state("weight", 0, Reduction::kSum);
};

}  // namespace tessera::observe
TESSERA_API_END
