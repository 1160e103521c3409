// Exports the files of a step as those of a model, block by block: reads each file of the step from
// start to end, and writes its blocks to their places.

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "blocks/blocks.h"
#include "hugging_face/export_folder.h"
#include "inspect/step_blocks.h"
#include "parameters/parameters.h"
#include "step/shards_of_others.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

constexpr std::string_view kOptimizer = "optimizer.";
constexpr std::string_view kState = "optimizer.state.";

/// The tensors of a step that are a model's. A module may be called "optimizer": what a save has
/// written of an optimizer is named by another tensor, "optimizer.state.FQN.exp_avg". In shards of
/// PyTorch's, that tensor may be under a prefix.
class Weights {
 public:
  Weights(const std::filesystem::path& step, const Manifest& manifest)
      : manifest_(manifest), of_others_(has_shards_of_others(step)) {}

  bool operator()(const std::string& name) const {
    if (of_others_ || !name.starts_with(kState)) {
      return !name.starts_with(of_others_ ? kOptimizer : kState);
    }
    return !manifest_.tensors.contains(name.substr(kState.size(), name.rfind('.') - kState.size()));
  }

 private:
  const Manifest& manifest_;
  bool of_others_;
};

bool is_average(const std::string& name) {
  return name.starts_with(kState) && name.ends_with(".ema");
}

bool is_adapter(const std::string& name) {
  return name.ends_with(".lora_A.weight") || name.ends_with(".lora_B.weight");
}

std::vector<SafetensorsWriter::Item> items_of_step(const Manifest& manifest,
                                                   const Weights& is_weight,
                                                   c10::ScalarType dtype) {
  std::vector<SafetensorsWriter::Item> items;
  for (const auto& [name, tensor] : manifest.tensors) {
    TESSERA_CHECK(
        !is_adapter(name), "the checkpoint holds an adapter, '", name,
        "', which an export of the model would leave out: load the checkpoint and merge the "
        "adapters (nn::merge_lora); of llama_train's with its flags of adapters, "
        "--initial-load STEP --steps 0 --merge-lora --save-hf DIR");
    if (is_weight(name)) {
      const c10::ScalarType stored = scalar_type_of(name, tensor);
      items.push_back({name, is_convertible_type(stored, dtype) ? dtype : stored, tensor.sizes});
    }
  }
  return items;
}

/// `entries`: of the step.
void check_config(const std::string& config_json, const nlohmann::json& entries,
                  const std::filesystem::path& step) {
  try {
    detail::parse_strict_json(config_json, {.depth = 16});
  } catch (const Error& error) {
    fail("the configuration for an export is not a JSON object (", error.what(),
         "): give the config.json of the model");
  }
  if (const auto saved = entries.find("model"); saved != entries.end() && saved->is_object()) {
    const std::string change = config_change(saved->dump(), config_json);
    TESSERA_CHECK(change.empty(), "the configuration is not that of the checkpoint '",
                  step.string(), "': ", change, "; give the config.json that it was trained with");
  }
}

/// A step has no tensor of a head that is the embedding.
void check_tied_head(const std::filesystem::path& step, const Manifest& manifest,
                     const std::string& config_json) {
  const auto embedding = manifest.tensors.find(kEmbedding);
  TESSERA_CHECK(
      embedding == manifest.tensors.end() || manifest.tensors.contains(kHead) ||
          !lacks_head(config_json, embedding->second.tied),
      "'", kEmbedding, "' and '", kHead, "' of the checkpoint '", step.string(),
      "' are one tensor, but the config.json does not say \"tie_word_embeddings\": true, without "
      "which readers draw the latter anew: say true there");
}

/// A run's own export has them instead of the weights.
void say_averages(const std::filesystem::path& step, const Manifest& manifest,
                  const Weights& is_weight) {
  const bool averages = std::ranges::any_of(manifest.tensors, [&](const auto& tensor) {
    return is_average(tensor.first) && !is_weight(tensor.first);
  });
  if (averages) {
    TORCH_WARN("the checkpoint '", step.string(),
               "' holds averages of the weights too (optimizer.state.*.ema): the weights are "
               "exported as they are; of llama_train's, --resume --save-hf exports the averages");
  }
}

/// Other programs save a tied parameter under both names.
void check_head(const std::filesystem::path& step, const Manifest& manifest) {
  at::Tensor embedding;
  const auto read = [&](const char* wanted, const auto& visit) {
    read_blocks(step, manifest, [&](const std::string& name) { return name == wanted; }, visit);
  };
  read(kEmbedding, [&](const std::string& name, auto offset, const at::Tensor& block) {
    if (!embedding.defined()) {
      embedding = at::empty(manifest.tensors.at(name).sizes, block.options());
    }
    block_at(embedding, offset, block.sizes()).copy_(block);
  });
  read(kHead, [&](const std::string&, auto offset, const at::Tensor& block) {
    const bool same =
        manifest.tensors.at(kHead).sizes == manifest.tensors.at(kEmbedding).sizes &&
        at::equal(block_at(embedding, offset, block.sizes()), block.to(embedding.scalar_type()));
    TESSERA_CHECK(same, "'", kEmbedding, "' and '", kHead, "' of the checkpoint '", step.string(),
                  "' have different values, but the config.json says \"tie_word_embeddings\": "
                  "true, with which readers drop the latter: say false there");
  });
}

}  // namespace

void export_hugging_face(const std::filesystem::path& step, const std::filesystem::path& folder,
                         const std::string& config_json, c10::ScalarType dtype,
                         const Progress& progress, const std::optional<FilesBesideWeights>& beside,
                         std::int64_t max_shard_bytes) {
  const Manifest manifest = manifest_in(step);
  check_config(config_json, manifest.entries, step);
  const Weights is_weight(step, manifest);
  const auto items = items_of_step(manifest, is_weight, dtype);
  TESSERA_CHECK(!items.empty(), "the checkpoint '", step.string(),
                "' holds no weights to export: give one that was saved with a model");
  check_tied_head(step, manifest, config_json);
  if (drops_head(config_json, items)) {
    check_head(step, manifest);
  }
  const std::string config = config_of_weights(with_model_type(config_json, items), dtype);
  check_export_folder(folder, config, bytes_of_all(items));
  if (beside) {
    check_beside_weights(*beside, folder);
  }
  say_averages(step, manifest, is_weight);
  ExportFolder files(folder, items, config, max_shard_bytes);
  std::uint64_t all = 0;
  for (const auto& [name, tensor] : manifest.tensors) {
    all += is_weight(name) ? bytes_of_tensor(tensor) : 0;
  }
  std::uint64_t done = 0;
  read_blocks(step, manifest, is_weight,
              [&](const std::string& name, auto offset, const at::Tensor& block) {
                files.write(
                    name, offset,
                    is_convertible_type(block.scalar_type(), dtype) ? block.to(dtype) : block);
                done += block.nbytes();
                if (progress) {
                  progress(done, all);
                }
              });
  if (beside) {
    copy_beside_weights(*beside, folder);
  }
  files.publish();
}

}  // namespace tessera::checkpoint
