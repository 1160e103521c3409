// The run of a rank is llama_train's own: whatever that does, its plan says.

#include "examples/llama/train/planned_run.h"

#include <memory>
#include <vector>

#include "examples/llama/train/llama_run.h"
#include "tessera/core/layout_math.h"

namespace llama {

using namespace tessera;

namespace {

/// A fake world is one of a CPU, whatever it is planned for.
TrainOptions on_cpu(TrainOptions options) {
  options.device = "cpu";
  options.backend = "gloo";
  return options;
}

/// By what ranks differ that share a sequence: the first and the last rank make fewer calls, and
/// the terms of gradients are longest on the first. Where a window begins differs on all.
std::int64_t part_of_sequence(std::int64_t rank, std::int64_t ranks, std::int64_t window) {
  if (window > 0) {
    return rank;
  }
  return rank == 0 ? 0 : (rank == ranks - 1 ? 2 : 1);
}

/// This rank's part of the tokens, and with context parallelism of the sequence.
std::vector<std::int64_t> sizes_of(const LlamaRun& run,
                                   const std::vector<std::int64_t>& coordinate) {
  const TrainOptions& o = run.options;
  const std::int64_t tokens = o.batch / (o.dp * o.dp_replicate * o.accumulate) * (o.seq / o.cp);
  std::vector<std::int64_t> sizes{chunk_size(tokens, o.tp, coordinate.back())};
  if (o.cp > 1) {
    const int cp = run.mesh.shape().dim("cp");
    sizes.push_back(part_of_sequence(coordinate[static_cast<std::size_t>(cp)], o.cp,
                                     run.config.sliding_window));
  }
  return sizes;
}

}  // namespace

planning::Run planned_run(const TrainOptions& options, const comm::WorldPtr& world) {
  const auto run = std::make_shared<LlamaRun>(on_cpu(options), world, /*loads=*/false);
  return {.model = run->model,
          .mesh = run->mesh,
          .step =
              [run] {
                const StrictScope strict;
                run->step();
              },
          .sizes = [run](const auto& coordinate) { return sizes_of(*run, coordinate); }};
}

}  // namespace llama
