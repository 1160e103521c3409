// Export of a model. Rank 0 writes the files, the others send their shards; the files appear only
// when all of them are complete.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "all_ranks.h"
#include "hugging_face/export_folder.h"
#include "hugging_face/send_parameters.h"
#include "parameters/parameters.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/comm/trace.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/nn/module.h"

namespace tessera::checkpoint {
namespace {

/// The type that a configuration says: the widest, so that readers who convert to it lose nothing.
c10::ScalarType type_of_weights(const std::vector<SafetensorsWriter::Item>& items) {
  const bool wide =
      std::ranges::any_of(items, [](const auto& item) { return item.dtype == c10::kDouble; });
  return wide ? c10::kDouble : c10::kFloat;
}

std::string config_of_export(const std::string& config_json,
                             const std::vector<SafetensorsWriter::Item>& items,
                             std::optional<c10::ScalarType> dtype) {
  return config_of_weights(with_model_type(config_json, items),
                           dtype.value_or(type_of_weights(items)));
}

std::vector<std::string> names_of_embedding(const std::vector<NamedParameter>& parameters) {
  const auto found = std::ranges::find_if(
      parameters, [](const NamedParameter& each) { return each.names.front() == kEmbedding; });
  return found == parameters.end() ? std::vector<std::string>() : found->names;
}

void check_head(const std::string& config_json, const std::vector<NamedParameter>& parameters,
                const std::vector<SafetensorsWriter::Item>& items) {
  TESSERA_CHECK(!lacks_head(config_json, names_of_embedding(parameters)), "'", kEmbedding,
                "' and '", kHead,
                "' are one parameter of the model, but its config.json does not say "
                "\"tie_word_embeddings\": true, without which readers draw the latter anew: say "
                "true there");
  TESSERA_CHECK(
      !drops_head(config_json, items), "the model has '", kEmbedding, "' and '", kHead,
      "', but its config.json says \"tie_word_embeddings\": true, with which readers drop "
      "the latter: say false there, or tie the two (nn::ModuleBase::tie_slot)");
}

}  // namespace

void check_save_hugging_face(const nn::ModuleBase& module, const std::filesystem::path& folder,
                             const std::string& config_json, std::optional<c10::ScalarType> dtype) {
  const std::vector<NamedParameter> named = model_slots(module);
  const auto items = items_of(sent_by_name(named), dtype);
  check_head(config_json, named, items);
  check_export_folder(folder, config_of_export(config_json, items, dtype), bytes_of_all(items));
}

void save_hugging_face(const nn::ModuleBase& module, comm::World& world,
                       const std::filesystem::path& folder, const std::string& config_json,
                       std::optional<c10::ScalarType> dtype, std::int64_t max_shard_bytes) {
  const comm::CallerScope caller("save_hugging_face");
  const at::NoGradGuard no_grad;
  std::vector<SentParameter> parameters;
  // On rank 0 alone. Its destructor removes the temporary files if anything below throws.
  std::optional<ExportFolder> files;
  run_or_fail_on_all(world, [&] {
    const std::vector<NamedParameter> named = model_slots(module);
    check_filled(named);
    parameters = sent_by_name(named);
    const auto items = items_of(parameters, dtype);
    check_head(config_json, named, items);
    if (world.rank() == 0) {
      const std::string config = config_of_export(config_json, items, dtype);
      check_export_folder(folder, config, bytes_of_all(items));
      files.emplace(folder, items, config, max_shard_bytes);
    }
  });
  Receiver receiver([&](const auto& name, auto offset, const at::Tensor& block) {
    files->write(name, offset, block);
  });
  send_all(parameters, world, receiver, dtype);
  run_or_fail_on_all(world, [&] {
    if (files) {
      receiver.check();
      files->publish();
    }
  });
}

}  // namespace tessera::checkpoint
