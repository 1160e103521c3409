// The flags of llama_train by the sections of a --config-file, which are torchtitan's. A flag is
// declared in one place, the file of its section, which also checks what the section's flags say
// about one another.

#pragma once

#include <cstdint>
#include <vector>

#include "examples/llama/config_file.h"
#include "examples/llama/train/options/train_options.h"

namespace CLI {
class App;
}

namespace llama {

/// Keeps the products of degrees far from overflow.
inline constexpr std::int64_t kMaxDegree = 1'000'000;

void declare_model(CLI::App& app, TrainOptions& options);        ///< [model]
void declare_training(CLI::App& app, TrainOptions& options);     ///< [training], [validation]
void declare_optimizer(CLI::App& app, TrainOptions& options);    ///< [optimizer], [lr_scheduler]
void declare_parallelism(CLI::App& app, TrainOptions& options);  ///< and [activation_checkpoint]
void declare_checkpoint(CLI::App& app, TrainOptions& options);   ///< [checkpoint]
void declare_metrics(CLI::App& app, TrainOptions& options);      ///< [metrics], [profiling], [job]

// Each throws tessera::Error for flags that contradict each other, or would change nothing.

void check_fine_tuning(const TrainOptions& options);
/// `needed`: the run reads data.
void check_data(const TrainOptions& options, bool needed);
void check_fp8(const TrainOptions& options);
void check_parallelism(const TrainOptions& options);
void check_checkpoints(const TrainOptions& options);
void check_metrics(const TrainOptions& options);

/// Fills in the outputs that have no place of their own, and go into --output-dir: those, and the
/// folder itself, are not for another run.
std::vector<LeftOut> place_outputs(const CLI::App& app, TrainOptions& options);
/// What the flags name to be read, by a run or, of a plan, by the run that is planned.
std::vector<NamedFile> read_files(const CLI::App& app);
/// Throws tessera::Error where a run would write two things to one place, or over what it reads.
void check_outputs(const TrainOptions& options);

}  // namespace llama
