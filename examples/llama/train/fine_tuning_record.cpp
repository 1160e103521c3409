#include "examples/llama/train/fine_tuning_record.h"

#include <nlohmann/json.hpp>
#include <vector>

namespace llama {

using Json = nlohmann::json;

tessera::nn::LoraOptions lora_options(const TrainOptions& o) {
  return {.rank = o.lora_rank,
          .alpha = o.lora_alpha.value_or(static_cast<double>(o.lora_rank)),
          .targets = o.lora_targets.empty() ? std::vector<std::string>{"model.layers.*.*.*_proj"}
                                            : o.lora_targets,
          .dropout = o.lora_dropout};
}

Json fine_tuning_record(const TrainOptions& o) {
  Json record = Json::object();
  if (o.lora_rank > 0) {
    const tessera::nn::LoraOptions lora = lora_options(o);
    record = {{"--lora-rank", lora.rank},
              {"--lora-alpha", lora.alpha},
              {"--lora-targets", lora.targets},
              {"--lora-dropout", lora.dropout}};
  }
  if (!o.freeze.empty()) {
    record["--freeze"] = o.freeze;
  }
  record["--optimizer"] = o.optimizer;
  if (o.ema) {
    record["--ema"] = *o.ema;
  }
  return record;
}

namespace {

std::string change_of(const char* flag, const Json& saved, const Json& now) {
  const Json before = saved.value(flag, Json());
  const Json after = now.value(flag, Json());
  if (before == after) {
    return "";
  }
  if (after.is_null()) {
    return std::string(flag) + " is left out, but was " + before.dump();
  }
  return std::string(flag) + " is " + after.dump() +
         (before.is_null() ? ", but was left out" : " instead of " + before.dump());
}

}  // namespace

std::string fine_tuning_change(const Json& saved, const Json& now, bool with_optimizer) {
  // The rank first: without it the others are left out, too.
  for (const char* flag : {"--lora-rank", "--lora-alpha", "--lora-targets", "--lora-dropout"}) {
    if (std::string change = change_of(flag, saved, now); !change.empty()) {
      return change;
    }
  }
  const std::string frozen = with_optimizer ? change_of("--freeze", saved, now) : "";
  return frozen.empty() && with_optimizer ? optimizer_change(saved, now) : frozen;
}

std::string optimizer_change(const Json& saved, const Json& now) {
  // Checkpoints of older programs do not say which.
  const std::string change =
      saved.contains("--optimizer") ? change_of("--optimizer", saved, now) : "";
  return change.empty() ? change_of("--ema", saved, now) : change;
}

std::string adapters_change(const Json& saved, const TrainOptions& o) {
  const Json now = fine_tuning_record(o);
  for (const char* flag : {"--lora-rank", "--lora-targets"}) {
    if (std::string change = change_of(flag, saved, now); !change.empty()) {
      return change;
    }
  }
  const std::string alpha = change_of("--lora-alpha", saved, now);
  const bool by_default = !alpha.empty() && !o.lora_alpha;
  return alpha + (by_default ? " (left out, it is --lora-rank)" : "");
}

}  // namespace llama
