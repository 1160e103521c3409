// What a run learns from, and what tells it from other data.

#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "examples/llama/models.h"
#include "examples/llama/train/options/train_options.h"
#include "tessera/comm/world.h"
#include "tessera/data/batch_loader.h"
#include "tessera/data/tokenizer.h"

namespace llama {

/// The tokens of a run, in batches.
struct TrainingData {
  tessera::data::TokenizerPtr tokenizer;                     ///< none without text
  std::shared_ptr<const tessera::data::BatchLoader> loader;  ///< none with --steps 0
  tessera::data::TokenSourcePtr eval_text;  ///< tokens of --eval-text, whose bytes are counted
  std::shared_ptr<const tessera::data::BatchLoader>
      eval_loader;                                    ///< none without --eval-text or --eval-tokens
  nlohmann::json samples = nlohmann::json::object();  ///< how files are cut into samples
};

/// Throws tessera::Error for data that can't be read, or are not for this model.
TrainingData open_training_data(const TrainOptions& options, const Config& config);

/// What decides which samples a step has: files, tokenizer, the tokens around texts, sizes. For
/// checkpoints. Reads a part of each file.
nlohmann::json data_fingerprint(const TrainOptions& options, const TrainingData& data);

/// In which way the data of a run are other than those of a checkpoint, by their fingerprints: "the
/// batch is 8 instead of 4"; "" if they are the same.
std::string data_change(const nlohmann::json& saved, const nlohmann::json& now);

/// Throws tessera::Error unless all ranks have the same data, the held-out text included. Names the
/// first rank whose data are not those of rank 0, and how they differ. Collective over `world`.
void check_same_data(const TrainOptions& options, const TrainingData& data,
                     tessera::comm::World& world);

}  // namespace llama
