#include "examples/llama/train/checkpoint_entries.h"

#include <nlohmann/json.hpp>
#include <string>

#include "examples/llama/train/fine_tuning_record.h"
#include "examples/llama/train/training_data.h"

namespace llama {

using namespace tessera;
using Json = nlohmann::json;

Json checkpoint_entries(const LlamaRun& run) {
  return {{"data", run.options.steps > 0 ? data_fingerprint(run.options, run.data) : Json()},
          {"model", Json::parse(run.config.json)},
          {"fine_tuning", fine_tuning_record(run.options)}};
}

namespace {

/// --initial-load goes on with other flags, but with the tensors that there are.
void check_flags_of_begin(const Json& saved, const training::Checkpointer& checkpoints,
                          const TrainOptions& options) {
  const std::string source = checkpoints.source().string();
  const std::string change = adapters_change(saved, options);
  TESSERA_CHECK(
      change.empty(), "--initial-load: the adapters are not those of '", source, "': ", change,
      "; give the same, or begin with its weights by --model: llama_train --steps 0 --resume "
      "--save-hf DIR writes them, and of a step with adapters --merge-lora as well");
  const std::string of_optimizer =
      checkpoints.excludes("optimizer") ? "" : optimizer_change(saved, fine_tuning_record(options));
  TESSERA_CHECK(of_optimizer.empty(), "--initial-load: the optimizer is not that of '", source,
                "': ", of_optimizer, "; give the same, or --exclude optimizer");
}

/// Before the tensors: other adapters, or another average, would be a list of names that are
/// missing.
void check_fine_tuning_flags(const Json& entries, const training::Checkpointer& checkpoints,
                             const TrainOptions& options) {
  // Checkpoints of older programs have none.
  if (!entries.contains("fine_tuning")) {
    return;
  }
  const Json& saved = entries.at("fine_tuning");
  if (!checkpoints.resumes()) {
    check_flags_of_begin(saved, checkpoints, options);
    return;
  }
  const std::string source = checkpoints.source().string();
  const std::string change =
      fine_tuning_change(saved, fine_tuning_record(options), !checkpoints.excludes("optimizer"));
  TESSERA_CHECK(change.empty(), "the flags are not those of the checkpoint '", source,
                "': ", change, "; give the same, or begin a run with --initial-load");
}

void check_data_and_model(const Json& saved, const training::Checkpointer& checkpoints,
                          const LlamaRun& run, const Json& entries) {
  const std::string source = checkpoints.source().string();
  if (!checkpoints.excludes("data") && run.options.steps > 0) {
    const std::string change = data_change(saved.at("data"), entries.at("data"));
    TESSERA_CHECK(change.empty(), "the data are not those of the checkpoint '", source,
                  "': ", change, "; give the same, or --exclude data to begin with other data");
  }
  if (checkpoints.resumes()) {
    const std::string change = checkpoint::config_change(saved.at("model").dump(), run.config.json);
    TESSERA_CHECK(change.empty(), "the model is not that of the checkpoint '", source,
                  "': ", change, "; give the same config.json, or begin a run with --initial-load");
  }
}

}  // namespace

void load_checkpoint(LlamaRun& run, training::Checkpointer& checkpoints, const Json& entries) {
  check_fine_tuning_flags(checkpoints.peek(run.state), checkpoints, run.options);
  const checkpoint::LoadReport report = checkpoints.load(run.state);
  try {
    check_data_and_model(report.entries, checkpoints, run, entries);
  } catch (const Json::exception&) {
    checkpoints.fail_as_foreign();
  }
}

}  // namespace llama
