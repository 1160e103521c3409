// A run that is not made: that of llama_train in a fake world.

#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "examples/llama/models.h"
#include "examples/llama/train/llama_run.h"
#include "tessera/comm/world.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace llama {

/// Ranks that have equal sizes of everything.
struct RankKind {
  int first = 0;           ///< the first rank of the kind
  std::int64_t count = 0;  ///< ranks of it
};

/// A run whose steps are made one by one, in a kernels::FakeMode and with memory that
/// observe::count_tensor_memory only reserves. It reads the model's configuration, and no other
/// file; it writes none.
class PlannedRun {
 public:
  /// `world`: a comm::fake_world of the run's ranks. `apply`: as LlamaRun takes it. Throws
  /// tessera::Error for what llama_train refuses.
  PlannedRun(const TrainOptions& options, const tessera::comm::WorldPtr& world,
             ApplyPlan apply = {});

  tessera::observe::StepMetrics step();
  /// As fsdp::under_way().
  std::string under_way();
  Llama& model() { return *run_.model; }
  const Config& config() const { return run_.config; }
  /// Of this rank in the mesh.
  const std::vector<std::int64_t>& coordinate() const { return run_.mesh.coordinate(); }
  /// By the sizes of ranks' shards, and of their parts of a sequence.
  std::vector<RankKind> kinds() const;

 private:
  using Place = std::pair<const tessera::ShardingSpec*, std::vector<std::int64_t>>;

  std::vector<Place> places() const;
  std::vector<std::int64_t> sizes_of(const std::vector<Place>& places,
                                     const std::vector<std::int64_t>& coordinate) const;

  LlamaRun run_;
  std::vector<const tessera::nn::ModuleBase*> units_;  ///< a module of each, the whole model last
  std::size_t unit_ = 0;                               ///< the one that was under way last
};

}  // namespace llama
