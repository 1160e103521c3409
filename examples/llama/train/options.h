#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "examples/llama/cli.h"

namespace CLI {
class App;
}

namespace llama {

struct TrainOptions {
  std::string model, config, tokenizer;
  std::uint64_t seed = 0;

  std::vector<std::string> tokens;  ///< globs of token shards
  std::vector<double> weights;      ///< weights of the token sources: empty, or one for each glob
  std::vector<std::string> jsonl;   ///< globs of JSONL files
  std::vector<std::string> text, eval_text;
  std::vector<std::string> eval_tokens;  ///< globs of held-out token shards
  std::string prompt_field = "prompt", completion_field = "completion";
  bool truncate = false;
  std::optional<std::uint64_t> shuffle;
  bool document_mask = false;
  std::optional<std::int64_t> eos_token;  ///< the token that ends documents and completions

  std::int64_t steps = 10, batch = 4, seq = 128, accumulate = 1;

  double dropout = 0;
  double z_loss = 0, label_smoothing = 0;
  /// Coefficient of the load-balancing loss; nullopt: the coefficient in the model's configuration.
  std::optional<double> router_aux_loss;
  double router_z_loss = 0;
  std::optional<std::int64_t> loss_chunks;  ///< number of loss chunks; nullopt: chosen by size
  std::string optimizer = "adamw";
  double lr = 1e-3, min_lr = 0, clip = 1.0, weight_decay = 0.1;
  std::vector<double> betas{0.9, 0.95};  // beta1 and beta2: usual values for language models
  double eps = 1e-8;
  std::string moment_dtype = "fp32";
  double momentum = 0.95;
  bool decay_matrices_only = false;
  std::optional<double> ema;
  std::string schedule = "constant";
  std::int64_t warmup = 0;
  double decay_ratio = 0.2;

  std::vector<std::string> freeze;
  std::int64_t lora_rank = 0;  ///< rank of the LoRA adapters; 0: no adapters
  std::optional<double> lora_alpha;
  double lora_dropout = 0;
  std::vector<std::string> lora_targets;
  std::string save_lora;
  bool merge_lora = false;

  std::int64_t dp_replicate = 1, dp = 1, ep = 1, cp = 1, tp = 1;
  bool sp = true, sp_regather = true, loss_parallel = true;
  int zero = 3;
  bool reshard_last = false;
  bool offload = false;
  std::string ac = "none";
  std::optional<double> memory;  ///< --ac auto: GiB of device memory that tensors may use
  std::string param_dtype, reduce_dtype = "fp32";
  bool fp8 = false;
  std::string device = "cpu", backend;
  bool allow_math_attention = false, deterministic = false;

  std::string checkpoint, initial_load;
  std::int64_t checkpoint_every =
      0;                          ///< number of steps between checkpoints; 0: save only at the end
  std::string resume;             ///< "": start a new run; "newest" or "auto": continue the run
  std::int64_t resume_step = -1;  ///< step to continue from; -1: --resume-step is not given
  bool async = true;
  int keep = 0;  ///< number of checkpoints to retain; 0 retains all checkpoints
  /// The parts of the checkpoint that the run does not load: "optimizer", "data".
  std::vector<std::string> exclude;

  std::string metrics, save_hf, save_hf_dtype;
  std::string profile, profile_steps;
  bool verify = false;
  std::int64_t log_every = 10;
  std::int64_t eval_every = 0;  ///< steps between evaluations; 0: evaluate only at the end
  std::string output_dir, tensorboard;
  std::string peak_flops;  ///< FLOP/s of a rank's device; "measure": measured; "": data-sheet value

  /// Whether the run is only planned (llama_plan). A planned run has no data, reads only the
  /// model's configuration, and writes nothing.
  bool planned = false;
  /// How many of the model's layers a planned run has; 0: all layers.
  std::int64_t layers = 0;
  /// For planned runs: the largest number of tokens of an expert, divided by the mean number.
  double expert_load = 1;

  std::int64_t ranks() const { return dp_replicate * dp * ep * cp * tp; }

  /// The names and values of all flags that the run uses, including defaults, for run.json.
  std::vector<std::pair<std::string, std::string>> listing;
  /// The flags and values that must be equal on all ranks. For a flag that names a file, ranks only
  /// compare whether the flag is given.
  std::map<std::string, std::string> shared;
  std::vector<std::string> given;
  std::vector<NamedFile> inputs;  ///< the files that the flags name as inputs
  /// All flags as the text of a --config-file. A run with this --config-file and another
  /// --output-dir repeats this run.
  std::string resolved;
};

/// Returns the table of all flags for docs/programs/training.md.
std::string flags_page();

std::filesystem::path record_file(const TrainOptions& options);

/// Whether --resume or --resume-step lets the run continue from its own checkpoints.
bool resumes(const TrainOptions& options);

/// Returns degrees of parallelism as the user would pass them: "--dp 2 x --tp 2". Degrees of 1 are
/// omitted, unless all are 1.
std::string product_text(const std::vector<std::pair<std::string, std::int64_t>>& degrees);

/// Parses "A:B", the first and the last step; steps count from 1, as in the metrics. Throws
/// tessera::Error for any other text.
std::pair<std::int64_t, std::int64_t> parse_step_range(const std::string& text);

/// Parses the command line. Throws tessera::Error for all errors that can be detected without other
/// ranks and without the contents of files.
TrainOptions parse_train_options(std::vector<std::string> arguments);

/// Replaces --dp -1 by the number of ranks divided by the other degrees. Throws tessera::Error if
/// the quotient is not an integer.
TrainOptions with_all_degrees(TrainOptions options, std::int64_t ranks);

/// Parses the flags of a program that plans a run. Such a program reads no data and writes none of
/// the run's outputs. `declare` adds the program's own flags. `uses_gpu` is called after parsing if
/// --device is not given.
TrainOptions parse_plan_options(std::vector<std::string> arguments,
                                const std::function<void(CLI::App&)>& declare,
                                const std::function<bool()>& uses_gpu);

}  // namespace llama
