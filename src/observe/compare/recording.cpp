#include "compare/recording.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <utility>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/atomic_file.h"
#include "tessera/core/error.h"

namespace tessera::observe {
namespace {

constexpr auto kManifest = "recording.json";

/// "step 1: the output of 'layers.0.norm'" as "step_1_the_output_of_layers.0.norm".
std::string as_file_name(const std::string& name) {
  std::string text;
  for (const char c : name) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.';
    if (plain || (!text.empty() && text.back() != '_')) {
      text += plain ? c : '_';
    }
  }
  return text.substr(0, std::min<std::size_t>(text.find_last_not_of('_') + 1, 200));
}

/// Copies on several ranks are written once.
std::vector<std::size_t> number_distinct(const std::vector<at::Tensor>& tensors,
                                         std::vector<at::Tensor>& distinct) {
  std::vector<std::size_t> numbers;
  for (const at::Tensor& tensor : tensors) {
    const auto same = std::ranges::find_if(distinct, [&](const at::Tensor& known) {
      return known.scalar_type() == tensor.scalar_type() && known.equal(tensor);
    });
    numbers.push_back(static_cast<std::size_t>(same - distinct.begin()));
    if (same == distinct.end()) {
      distinct.push_back(tensor);
    }
  }
  return numbers;
}

}  // namespace

std::string step_prefix(std::int64_t step) {
  return fmt::format("step {}: ", step);
}

Recording::Recording(std::filesystem::path folder) : folder_(std::move(folder)) {
  complete_ = std::filesystem::exists(folder_ / kManifest);
  if (complete_) {
    read();
    return;
  }
  TESSERA_CHECK(!std::filesystem::exists(folder_) || std::filesystem::is_empty(folder_),
                "compare_runs: ", folder_.string(), " holds files, but no complete recording (",
                kManifest, "); name another folder, or empty it to record again");
  std::filesystem::create_directories(folder_);
}

void Recording::read() {
  const std::filesystem::path path = folder_ / kManifest;
  std::ifstream file(path);
  try {
    const nlohmann::json json = nlohmann::json::parse(file);
    mesh_ = json.at("mesh");
    steps_ = json.at("steps");
    for (const nlohmann::json& item : json.at("tensors")) {
      entries_.push_back({item.at("name"), item.at("file"), item.at("batches"), item.at("ranks"),
                          item.at("tensors"), item.at("layout")});
      index_.emplace(entries_.back().name, entries_.size() - 1);
    }
  } catch (const nlohmann::json::exception& error) {
    fail("compare_runs: ", path.string(), " can't be read: ", error.what(),
         "; record again into an empty folder");
  }
}

std::string Recording::manifest() const {
  nlohmann::json tensors = nlohmann::json::array();
  for (const Entry& entry : entries_) {
    tensors.push_back({{"name", entry.name},
                       {"file", entry.file},
                       {"batches", entry.batches},
                       {"ranks", entry.ranks},
                       {"tensors", entry.tensors},
                       {"layout", entry.layout}});
  }
  return nlohmann::json{{"mesh", mesh_}, {"steps", steps_}, {"tensors", tensors}}.dump(1) + "\n";
}

void Recording::add(const std::string& name, const RankParts& parts, const std::string& layout) {
  std::vector<at::Tensor> distinct;
  Entry entry{name,
              fmt::format("{:05}_{}.safetensors", entries_.size(), as_file_name(name)),
              parts.batches,
              parts.ranks,
              number_distinct(parts.tensors, distinct),
              layout};
  std::vector<checkpoint::SafetensorsWriter::Item> items;
  for (std::size_t i = 0; i < distinct.size(); ++i) {
    items.push_back({std::to_string(i), distinct[i].scalar_type(), distinct[i].sizes().vec()});
  }
  checkpoint::SafetensorsWriter writer(folder_ / entry.file, items);
  for (std::size_t i = 0; i < distinct.size(); ++i) {
    writer.write(std::to_string(i), distinct[i]);
  }
  writer.finish();
  entries_.push_back(std::move(entry));
}

void Recording::finish(const std::string& mesh, std::int64_t steps) {
  mesh_ = mesh;
  steps_ = steps;
  tessera::files::write_file(folder_ / kManifest, manifest());
}

std::optional<RecordedTensor> Recording::find(const std::string& name) {
  const auto known = index_.find(name);
  if (known == index_.end()) {
    return std::nullopt;
  }
  Entry& entry = entries_[known->second];
  entry.found = true;
  const checkpoint::SafetensorsFile file(folder_ / entry.file);
  RecordedTensor recorded{{entry.batches, entry.ranks, {}}, entry.layout};
  for (const std::size_t number : entry.tensors) {
    recorded.parts.tensors.push_back(file.read(std::to_string(number)));
  }
  return recorded;
}

std::vector<std::string> Recording::not_found(std::int64_t step) const {
  std::vector<std::string> names;
  for (const Entry& entry : entries_) {
    if (!entry.found && entry.name.starts_with(step_prefix(step))) {
      names.push_back(entry.name.substr(step_prefix(step).size()));
    }
  }
  return names;
}

}  // namespace tessera::observe
