// Exports a model, or its adapters, to a folder in Hugging Face's format.

#include <ATen/core/grad_mode.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <exception>
#include <system_error>

#include "model_folder.h"
#include "parameters.h"
#include "ranks.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/comm/world.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"
#include "tessera/nn/detail/lora.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"

namespace tessera::checkpoint {
namespace {

struct SentParameter {
  nn::SlotPtr slot;
  std::vector<StoredTensor> tensors;
};

/// The dtype in which floating-point weights are exported. nullopt: fp64 weights stay fp64, and all
/// others become fp32, which represents every 16-bit value exactly.
using SentType = std::optional<c10::ScalarType>;

c10::ScalarType saved_type(const at::Tensor& tensor, SentType dtype) {
  const c10::ScalarType type = tensor.scalar_type();
  if (!c10::isFloatingType(type)) {
    return type;
  }
  return dtype.value_or(type == c10::kDouble ? type : c10::kFloat);
}

std::vector<SentParameter> sent_by_name(const std::vector<NamedParameter>& parameters) {
  std::vector<SentParameter> sent;
  for (const NamedParameter& each : parameters) {
    sent.push_back({each.slot, stored_tensors(each.names.front(), *each.slot)});
  }
  return sent;
}

/// Returns the tensors to export. Throws Error for parameters that cannot be saved.
std::vector<SafetensorsWriter::Item> items_of(const std::vector<SentParameter>& parameters,
                                              SentType dtype = {}) {
  std::vector<SafetensorsWriter::Item> items;
  for (const SentParameter& each : parameters) {
    check_one_value(*each.slot, each.tensors.front().name);
    for (const StoredTensor& stored : each.tensors) {
      items.push_back({stored.name, saved_type(each.slot->persistent(), dtype), stored.sizes});
    }
  }
  return items;
}

using Write = std::function<void(const std::string& name, std::span<const std::int64_t> offset,
                                 const at::Tensor& block)>;

/// Sends the parameters to rank 0, which passes blocks to `write`. Returns the first error of
/// `write`. Rank 0 receives all blocks even after an error. Collective.
std::exception_ptr send_all(const std::vector<SentParameter>& parameters, comm::World& world,
                            const Write& write, SentType dtype = {}) {
  const auto group = all_ranks(world);
  std::exception_ptr failure;
  const Write write_unless_failed = [&](const auto& name, auto offset, const at::Tensor& block) {
    try {
      if (!failure) {
        write(name, offset, block);
      }
    } catch (...) {
      failure = std::current_exception();
    }
  };
  try {
    for (const SentParameter& each : parameters) {
      const auto& tensor = each.slot->persistent();
      gather_blocks(tensor, saved_type(tensor, dtype), *group,
                    c10::Device(world.options().device).type(),
                    [&](std::span<const std::int64_t> offset, const at::Tensor& block) {
                      for (const StoredTensor& stored : each.tensors) {
                        stored.visit(offset, block, [&](const auto& at, const at::Tensor& part) {
                          write_unless_failed(stored.name, at, part);
                        });
                      }
                    });
    }
  } catch (...) {
    world.abort();
    throw;
  }
  return failure;
}

void rethrow(const std::exception_ptr& failure) {
  if (failure) {
    std::rethrow_exception(failure);
  }
}

/// Returns the type of the weights for config.json: the widest type of all weights, so that readers
/// that convert to this type lose nothing.
c10::ScalarType type_of_weights(const std::vector<SafetensorsWriter::Item>& items) {
  const bool wide =
      std::ranges::any_of(items, [](const auto& item) { return item.dtype == c10::kDouble; });
  return wide ? c10::kDouble : c10::kFloat;
}

std::string config_of_export(const std::string& config_json,
                             const std::vector<SafetensorsWriter::Item>& items,
                             std::optional<c10::ScalarType> dtype) {
  return config_of_weights(config_json, dtype.value_or(type_of_weights(items)));
}

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kHead = "lm_head.weight";

/// Throws Error if head and embedding are tied in only one of configuration and model. Other
/// programs would then ignore the head's weights or initialize a new head.
void check_head(const std::string& config_json, const std::vector<NamedParameter>& parameters,
                const std::vector<SafetensorsWriter::Item>& items) {
  const auto config = nlohmann::ordered_json::parse(config_json, nullptr,
                                                    /*allow_exceptions=*/false);
  if (!config.is_object()) {
    return;
  }
  const auto embedding = std::ranges::find(
      parameters, kEmbedding, [](const NamedParameter& each) { return each.names.front(); });
  const bool tied = embedding != parameters.end() &&
                    std::ranges::find(embedding->names, kHead) != embedding->names.end();
  const auto tie = config.value("tie_word_embeddings", nlohmann::ordered_json());
  const auto type = config.value("model_type", nlohmann::ordered_json());
  // If "tie_word_embeddings" is missing, the model's class decides whether head and embedding are
  // tied. The classes of the listed model types do not tie head and embedding.
  const nlohmann::ordered_json untied{nullptr, "llama",   "mistral",   "qwen2",
                                      "qwen3", "mixtral", "qwen3_moe", "olmoe"};
  const bool apart =
      tie == false || (tie.is_null() && std::ranges::find(untied, type) != untied.end());
  TESSERA_CHECK(
      !tied || !apart, "'", kEmbedding, "' and '", kHead,
      "' are one parameter of the model, but config.json does not have \"tie_word_embeddings\": "
      "true, so other programs would initialize a new output head: set \"tie_word_embeddings\" to "
      "true");
  const auto has = [&](const char* name) {
    return std::ranges::find(items, name, &SafetensorsWriter::Item::name) != items.end();
  };
  TESSERA_CHECK(tie != true || !has(kEmbedding) || !has(kHead),
                "the model has separate parameters '", kEmbedding, "' and '", kHead,
                "', but config.json has \"tie_word_embeddings\": true, so other programs would "
                "ignore the output head: set \"tie_word_embeddings\" to false, or tie the two "
                "parameters (nn::ModuleBase::tie_slot)");
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
  // `files` exists only on rank 0. If a later statement throws, the destructor of `files` removes
  // the temporary files.
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
  const std::exception_ptr failure = send_all(
      parameters, world,
      [&](const auto& name, auto offset, const at::Tensor& block) {
        files->write(name, offset, block);
      },
      dtype);
  run_or_fail_on_all(world, [&] {
    if (files) {
      rethrow(failure);
      files->publish();
    }
  });
}

namespace {

using nn::LoraLinear;

std::vector<StoredTensor> stored_weights(const LoraLinear& each) {
  return stored_tensors(nn::detail::join_fqn(each.fqn, "weight"), *each.weight);
}

std::int64_t rank_of(const LoraLinear& each) {
  return each.a->persistent().size(-2);
}

/// Throws Error unless two adapters have equal settings, because PEFT's adapter_config.json has one
/// value for all adapters.
void check_alike(const LoraLinear& each, const LoraLinear& first) {
  TESSERA_CHECK(
      rank_of(each) == rank_of(first) && each.scale == first.scale && each.dropout == first.dropout,
      "save_lora: the adapters of '", first.fqn, "' and '", each.fqn,
      "' differ in rank, alpha or dropout; pass equal options for all adapters");
}

std::vector<LoraLinear> adapters_of(const nn::ModuleBase& module) {
  std::vector<LoraLinear> adapters = nn::lora_linears(module);
  TESSERA_CHECK(!adapters.empty(), "save_lora: a ", module.name(),
                " has no adapters; call nn::apply_lora before training");
  for (const LoraLinear& each : adapters) {
    check_alike(each, adapters.front());
  }
  return adapters;
}

/// Returns, for PEFT, Hugging Face's names of the modules with adapters. A FusedLinear has one name
/// for each of its parts. A GroupedLinear has one name for each expert.
std::vector<std::string> target_modules(const std::vector<LoraLinear>& adapters) {
  std::vector<std::string> names;
  for (const LoraLinear& each : adapters) {
    for (const StoredTensor& part : stored_weights(each)) {
      const std::size_t end = part.name.rfind('.');
      names.push_back(end == std::string::npos ? "" : part.name.substr(0, end));
    }
  }
  std::ranges::sort(names);
  return names;
}

std::string config_of(const std::vector<LoraLinear>& adapters, const std::string& base_model) {
  const LoraLinear& first = adapters.front();
  const nlohmann::ordered_json config = {
      {"base_model_name_or_path", base_model},
      {"bias", "none"},
      {"fan_in_fan_out", false},
      {"inference_mode", true},
      {"lora_alpha", first.scale * static_cast<double>(rank_of(first))},
      {"lora_dropout", first.dropout},
      {"peft_type", "LORA"},
      {"r", rank_of(first)},
      {"target_modules", target_modules(adapters)},
      {"task_type", "CAUSAL_LM"}};
  return config.dump(2) + "\n";
}

std::vector<NamedParameter> parameters_of(const nn::ModuleBase& module) {
  std::vector<NamedParameter> parameters;
  for (const auto& [name, slot] : nn::lora_slots(module)) {
    parameters.push_back({slot, {name}});
  }
  return parameters;
}

/// Adds the matrices A and B of an adapter. A part of a fused Linear has all of A and some rows of
/// B. Each expert has its own matrices.
void add_sent(std::vector<SentParameter>& sent, const LoraLinear& each) {
  SentParameter a{each.a, {}}, b{each.b, stored_weights(each)};
  for (StoredTensor& part : b.tensors) {
    const std::string module = part.name.substr(0, part.name.size() - std::string("weight").size());
    const std::string name = "base_model.model." + module;
    std::vector<std::int64_t> sizes = a.slot->persistent().sizes().vec();
    if (part.is_matrix_of_stack) {
      a.tensors.push_back(part);
      sizes.erase(sizes.begin());
    } else {
      a.tensors.emplace_back();
    }
    a.tensors.back().name = name + "lora_A.weight";
    a.tensors.back().sizes = std::move(sizes);
    part.name = name + "lora_B.weight";
    part.sizes.back() = rank_of(each);
  }
  sent.push_back(std::move(a));
  sent.push_back(std::move(b));
}

std::vector<SentParameter> sent_adapters(const nn::ModuleBase& module) {
  std::vector<SentParameter> sent;
  for (const LoraLinear& each : nn::lora_linears(module)) {
    add_sent(sent, each);
  }
  return sent;
}

/// Checks that the adapters of a model can be exported to the folder, and returns the adapters'
/// configuration for PEFT.
std::string checked_config(const nn::ModuleBase& module, const std::filesystem::path& folder,
                           const std::string& base_model) {
  std::error_code missing;
  TESSERA_CHECK(!std::filesystem::equivalent(folder, base_model, missing), "the folder '",
                folder.string(),
                "' has the base model of the adapters; pass another folder for the adapters");
  std::string config = config_of(adapters_of(module), base_model);
  check_export_folder(folder, config, bytes_of_all(items_of(sent_adapters(module))),
                      kAdapterConfig);
  return config;
}

}  // namespace

void check_save_lora(const nn::ModuleBase& module, const std::filesystem::path& folder,
                     const std::string& base_model) {
  checked_config(module, folder, base_model);
}

void save_lora(const nn::ModuleBase& module, comm::World& world,
               const std::filesystem::path& folder, const std::string& base_model) {
  const comm::CallerScope caller("save_lora");
  const at::NoGradGuard no_grad;
  std::vector<SentParameter> parameters;
  std::string config;
  // `file` exists only on rank 0. If a later statement throws, the destructor of `file` removes the
  // temporary file.
  std::optional<SafetensorsWriter> file;
  run_or_fail_on_all(world, [&] {
    adapters_of(module);
    check_filled(parameters_of(module));
    parameters = sent_adapters(module);
    if (world.rank() == 0) {
      config = checked_config(module, folder, base_model);
      files::create_folders(folder);
      file.emplace(folder / kAdapterFile, items_of(parameters));
    }
  });
  const std::exception_ptr failure =
      send_all(parameters, world, [&](const auto& name, auto offset, const at::Tensor& block) {
        file->write(name, offset, block);
      });
  run_or_fail_on_all(world, [&] {
    if (file) {
      rethrow(failure);
      file->finish();
      // adapter_config.json is written last, because a folder with this file counts as an adapter.
      // checked_config() has found that an existing adapter_config.json has the same content.
      files::write_file(folder / kAdapterConfig, config);
    }
  });
}

}  // namespace tessera::checkpoint
