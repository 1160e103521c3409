#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {
class World;
}

namespace tessera::observe {

/// How a state of a Metric is combined over the ranks.
enum class Reduction : std::uint8_t { kSum, kMin, kMax };

/// A number that is accumulated over many steps, like Metric of torchmetrics. Each rank accumulates
/// the values of its own data. A checkpoint saves the state of each rank
/// (checkpoint::StateDict::rank_states). A custom metric:
///
///   class Accuracy final : public observe::Metric {
///   public:
///     void update(double right, double seen) {
///       check_update();
///       right_ += right;
///       seen_ += seen;
///     }
///     double compute() const override { return right_ / seen_; }
///
///   private:
///     double& right_ = add_state("right", 0, observe::Reduction::kSum);
///     double& seen_ = add_state("seen", 0, observe::Reduction::kSum);
///   };
///
/// Not thread safe: use a metric from one thread at a time.
class Metric : public checkpoint::RankState, tessera::detail::NoCopy {
 public:
  /// The value of the metric for this rank's data since reset(). Between sync() and unsync(), the
  /// value for the data of all ranks.
  virtual double compute() const = 0;
  /// Replaces this rank's values by the values reduced over all ranks, until unsync(). No effect in
  /// a world of one rank. Collective over `world`. Throws Error if the metric is already synced.
  void sync(comm::World& world);
  /// Restores this rank's own values. Throws Error if the metric is not synced.
  void unsync();
  bool synced() const { return synced_; }

  /// Whether checkpoints save this metric; set_persistent(false) excludes this metric.
  bool persistent() const override { return persistent_; }
  void set_persistent(bool persistent) { persistent_ = persistent; }

  /// The state for a checkpoint: this rank's own values, also between sync() and unsync().
  nlohmann::json state_dict() const override;
  void load_state_dict(const nlohmann::json& state) override;
  nlohmann::json merged(const std::vector<nlohmann::json>& of_ranks) const override;
  void reset() override;

 protected:
  /// Adds a value to the state of the metric, which update() changes. The reference stays valid.
  /// Throws Error for a name used twice, and for a sum with a nonzero initial value.
  double& add_state(const std::string& name, double initial, Reduction reduction);
  /// Checks that values may change: throws Error between sync() and unsync(). update() must call
  /// this function.
  void check_update() const;

 private:
  struct Value {
    double value;
    double initial;
    Reduction reduction;
  };
  void set_values(const nlohmann::json& state);

  std::map<std::string, Value> values_;
  nlohmann::json own_;  ///< this rank's own values while the metric is synced; null otherwise
  bool synced_ = false;
  bool persistent_ = true;
};

/// The weighted mean of values, for example of losses with the numbers of tokens as weights.
class MeanMetric final : public Metric {
 public:
  /// Adds a value with its weight.
  void update(double value, double weight = 1);
  /// The weighted mean; NaN if update() was never called.
  double compute() const override;

 private:
  double& sum_ = add_state("sum", 0, Reduction::kSum);
  double& weight_ = add_state("weight", 0, Reduction::kSum);
};

}  // namespace tessera::observe
TESSERA_API_END
