// The run of a rank is llama_train's own: whatever that does, its plan says.

#include "examples/llama/train/planned_run.h"

#include <algorithm>
#include <memory>
#include <utility>
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

/// How many columns the masks of a rank's two chunks have in context parallelism, which say how
/// large they are (nn::ContextParallel).
std::int64_t keys_of_masks(std::int64_t sequence, std::int64_t ranks, std::int64_t rank,
                           std::int64_t window) {
  const std::int64_t length = sequence / (2 * ranks);
  std::int64_t keys = 0;
  for (const std::int64_t chunk : {rank, 2 * ranks - 1 - rank}) {
    const bool is_plain = chunk == 0 && (window == 0 || window >= length);
    const std::int64_t seen = (chunk + 1) * length;
    const std::int64_t in_window = window > 0 ? std::min(seen, length + window - 1) : seen;
    keys += is_plain ? 0 : in_window;
  }
  return keys;
}

/// This rank's part of the tokens, and with context parallelism of the masks.
std::vector<std::int64_t> sizes_of(const LlamaRun& run,
                                   const std::vector<std::int64_t>& coordinate) {
  const TrainOptions& o = run.options;
  const std::int64_t tokens = o.batch / (o.dp * o.dp_replicate * o.accumulate) * (o.seq / o.cp);
  std::vector<std::int64_t> sizes{chunk_size(tokens, o.tp, coordinate.back())};
  if (o.cp > 1) {
    const int cp = run.mesh.shape().dim("cp");
    sizes.push_back(keys_of_masks(o.seq, o.cp, coordinate[static_cast<std::size_t>(cp)],
                                  run.config.sliding_window));
  }
  return sizes;
}

}  // namespace

planning::Run planned_run(const TrainOptions& options, const comm::WorldPtr& world,
                          const ApplyPlan& apply) {
  const auto run = std::make_shared<LlamaRun>(on_cpu(options), world, /*loads=*/false, apply);
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
