// What a run's checkpoints note of the flags of fine-tuning, so that it goes on with the same.

#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "examples/llama/train/options/train_options.h"
#include "tessera/nn/lora.h"

namespace llama {

/// The adapters of --lora-rank, with the defaults of what is not given.
tessera::nn::LoraOptions lora_options(const TrainOptions& options);

/// The flags that decide, beside the model's config.json, what a step computes and what the
/// optimizer keeps: an object of their names and values, without those that are off. For
/// checkpoints.
nlohmann::json fine_tuning_record(const TrainOptions& options);

/// In which way the flags of a run are other than those of a checkpoint, by their records:
/// "--lora-alpha is 16 instead of 4"; "" if they are the same. `with_optimizer`: whether its state
/// is loaded too, which --freeze, --optimizer and --ema decide on.
std::string fine_tuning_change(const nlohmann::json& saved, const nlohmann::json& now,
                               bool with_optimizer);

/// The same of --optimizer and --ema alone, which decide what state there is.
std::string optimizer_change(const nlohmann::json& saved, const nlohmann::json& now);

/// The same of the flags alone that decide which tensors adapters have, and by what their term is
/// scaled: with another --lora-alpha the weights that they are merged into would be other ones.
std::string adapters_change(const nlohmann::json& saved, const TrainOptions& options);

}  // namespace llama
