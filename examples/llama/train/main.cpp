// main() of llama_train: command line, world (comm::World), signals and errors. The training itself
// is in llama_train.cpp.

#include <c10/util/Exception.h>

#include <cstdlib>
#include <optional>

#include "examples/llama/cli.h"
#include "examples/llama/train/run.h"
#include "tessera/core/error.h"
#include "tessera/core/process.h"
#include "tessera/kernels/products.h"
#include "tessera/observe/metrics.h"

namespace {

int train(std::vector<std::string> arguments) {
  llama::TrainOptions options = llama::parse_train_options(std::move(arguments));
  // With TESSERA_COUNT_MEMORY, a run on a CPU also has the metric peak_active_bytes, for comparison
  // with the peak memory of a plan.
  if (std::getenv("TESSERA_COUNT_MEMORY") != nullptr) {
    tessera::observe::count_tensor_memory();
  }
  // Signal handlers are installed before start-up and never removed, so that no signal is lost or
  // kills a rank that has saved. Without --checkpoint, a signal ends the run immediately.
  static auto& signals = *new std::optional<tessera::StopSignals>;
  if (!options.checkpoint.empty()) {
    signals.emplace();
  }
  llama::check_model(options);
  // An exception that leaves this block aborts the world (comm::World), so that ranks waiting for
  // this rank fail immediately instead of at the timeout.
  const tessera::comm::WorldScope scope(tessera::comm::world_from_environment(
      {.device = options.device, .backend = options.backend}));
  try {
    options = llama::with_all_degrees(std::move(options), scope.world()->size());
    const bool finished = llama::train(options, scope.world(), signals ? &*signals : nullptr);
    return finished ? 0 : tessera::kStoppedExitCode;
  } catch (const c10::Error& error) {
    // The what() of a c10::Error (for example out of memory) would include a long stack trace.
    tessera::fail("rank ", scope.world()->rank(), ": ", error.what_without_backtrace());
  }
}

}  // namespace

int main(int argc, char** argv) {
  tessera::kernels::use_fast_products();
  return llama::run_program("llama_train", argc, argv, train);
}
