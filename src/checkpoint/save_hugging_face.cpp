#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include "agree.h"
#include "gather_blocks.h"
#include "model_files.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/comm/world.h"
#include "tessera/core/atomic_file.h"
#include "tessera/core/error.h"
#include "tessera/nn/module.h"

namespace tessera::checkpoint {
namespace {

using Item = SafetensorsWriter::Item;

c10::ScalarType saved_type(const at::Tensor& tensor) {
  return c10::isFloatingType(tensor.scalar_type()) ? c10::kFloat : tensor.scalar_type();
}

Item item_of(const std::string& name, const at::Tensor& tensor) {
  return {name, saved_type(tensor), tensor.sizes().vec()};
}

std::int64_t bytes_of(const Item& item) {
  return std::accumulate(item.sizes.begin(), item.sizes.end(),
                         static_cast<std::int64_t>(c10::elementSize(item.dtype)),
                         std::multiplies<>());
}

/// In order, each shard as full as the limit allows.
std::vector<std::vector<Item>> split_in_shards(const std::vector<Item>& items, std::int64_t limit) {
  std::vector<std::vector<Item>> shards(1);
  std::int64_t bytes = 0;
  for (const auto& item : items) {
    if (!shards.back().empty() && bytes + bytes_of(item) > limit) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += bytes_of(item);
    shards.back().push_back(item);
  }
  return shards;
}

/// The files of one export, on the rank that writes them. Until publish(), nothing but temporary
/// files exists.
class Export {
 public:
  Export(const std::filesystem::path& folder, const std::vector<Item>& items,
         std::string config_json, std::int64_t max_shard_bytes)
      : folder_(folder), config_json_(std::move(config_json)) {
    std::error_code ignored;  // opening the first file says what is wrong
    std::filesystem::create_directories(folder, ignored);
    const auto shards = split_in_shards(items, max_shard_bytes);
    for (std::size_t i = 0; i < shards.size(); ++i) {
      names_.push_back(shards.size() == 1
                           ? kSingleFile
                           : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size()));
      writers_.emplace_back(folder / names_.back(), shards[i]);
      for (const auto& item : shards[i]) {
        shard_of_[item.name] = i;
        total_bytes_ += bytes_of(item);
      }
    }
  }

  void write(const std::string& name, std::span<const std::int64_t> offset,
             const at::Tensor& block) {
    writers_[shard_of_.at(name)].write(name, offset, block);
  }

  /// A reader finds the older model, the new one, or (while several shards replace others) none; it
  /// never finds a mixture.
  void publish() {
    for (auto& writer : writers_) writer.seal();
    const bool single = writers_.size() == 1;
    if (!single && !std::filesystem::exists(folder_ / kSingleFile)) remove(kIndexFile);
    for (auto& writer : writers_) writer.publish();
    if (single) {
      remove(kIndexFile);
    } else {
      write_file(folder_ / kIndexFile, index_json());
      remove(kSingleFile);
    }
    remove_older_shards();
    write_file(folder_ / "config.json", config_json_);
  }

 private:
  std::string index_json() const {
    nlohmann::ordered_json index;
    index["metadata"]["total_size"] = total_bytes_;
    std::map<std::string, std::string> weight_map;
    for (const auto& [name, shard] : shard_of_) weight_map[name] = names_[shard];
    index["weight_map"] = weight_map;
    return index.dump(2) + "\n";
  }

  void remove(const std::string& name) const {
    if (std::filesystem::remove(folder_ / name)) sync_folder(folder_);
  }

  void remove_older_shards() const {
    const std::regex shard(R"(model-\d{5}-of-\d{5}\.safetensors)");
    std::set<std::string> older;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      const auto name = entry.path().filename().string();
      if (std::regex_match(name, shard)) older.insert(name);
    }
    for (const auto& name : names_) older.erase(name);
    for (const auto& name : older) remove(name);
  }

  std::filesystem::path folder_;
  std::string config_json_;
  std::vector<std::string> names_;
  std::vector<SafetensorsWriter> writers_;
  std::map<std::string, std::size_t> shard_of_;
  std::int64_t total_bytes_ = 0;
};

/// Rank 0 goes on receiving after a failing write, so that its peers don't wait for it; the first
/// failure is thrown at the end.
class Receiver {
 public:
  explicit Receiver(Export& files) : files_(files) {}

  void write(const std::string& name, std::span<const std::int64_t> offset,
             const at::Tensor& block) {
    if (failure_) return;
    try {
      files_.write(name, offset, block);
    } catch (const Error& error) {
      failure_ = error;
    }
  }
  void finish() {
    if (failure_) throw *failure_;
    files_.publish();
  }

 private:
  Export& files_;
  std::optional<Error> failure_;
};

comm::CommunicatorPtr all_ranks(comm::World& world) {
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return world.group(ranks, "world");
}

}  // namespace

void save_hugging_face(const nn::ModuleBase& module, comm::World& world,
                       const std::filesystem::path& folder, const std::string& config_json,
                       std::int64_t max_shard_bytes) {
  const at::NoGradGuard no_grad;
  const auto group = all_ranks(world);
  const auto device = c10::Device(world.options().device).type();
  const auto slots = module.named_slots();
  std::vector<Item> items;
  std::optional<Export> files;
  agree(*group, device, [&] {
    for (const auto& [name, slot] : slots) {
      TESSERA_CHECK(slot->initialized(), "parameter '", name,
                    "' was never filled: call nn::init_weights() or load before saving");
      check_gatherable(slot->persistent(), name);
      items.push_back(item_of(name, slot->persistent()));
    }
    if (world.rank() == 0) files.emplace(folder, items, config_json, max_shard_bytes);
  });
  std::optional<Receiver> receiver;
  if (files) receiver.emplace(*files);
  for (const auto& [name, slot] : slots) {
    const auto& tensor = slot->persistent();
    gather_blocks(tensor, saved_type(tensor), *group, device,
                  [&, &name = name](std::span<const std::int64_t> offset, const at::Tensor& block) {
                    receiver->write(name, offset, block);
                  });
  }
  agree(*group, device, [&] {
    if (receiver) receiver->finish();
  });
}

}  // namespace tessera::checkpoint
