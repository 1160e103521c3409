#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {
class World;
}

namespace tessera::observe {

/// The weighted mean of values over many steps, like MeanMetric of torchmetrics. Each rank
/// accumulates its own values, and a checkpoint saves each rank's state
/// (checkpoint::StateDict::rank_states). Not thread safe.
class MeanMetric final : public checkpoint::RankState, tessera::detail::NoCopy {
 public:
  /// Adds a value with its weight. Throws Error between sync() and unsync().
  void update(double value, double weight = 1);
  /// Returns the weighted mean of this rank's values since reset(); between sync() and unsync(),
  /// the mean over the values of all ranks. NaN if there are no values.
  double compute() const;
  /// Replaces this rank's sums by the sums over all ranks, until unsync(). Collective over `world`.
  /// Throws Error if the metric is already synced.
  void sync(comm::World& world);
  /// Undoes sync(): restores this rank's own sums. Throws Error if the metric is not synced.
  void unsync();

  /// Returns the state for a checkpoint: this rank's own sums, also between sync() and unsync().
  nlohmann::json state_dict() const override;
  void reset() override;

 private:
  void load_state_dict(const nlohmann::json& state) override;
  nlohmann::json merged(const std::vector<nlohmann::json>& of_ranks) const override;

  struct Sums {
    double values = 0, weights = 0;
  };
  static Sums read(const nlohmann::json& state);

  Sums own_;
  std::optional<Sums> of_all_;  ///< the sums of all ranks while the metric is synced
};

}  // namespace tessera::observe
TESSERA_API_END
