// The weights in a Hugging Face folder.

#pragma once

#include <deque>
#include <filesystem>
#include <map>
#include <string>

#include "tessera/checkpoint/safetensors.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

inline constexpr const char* kSingleFile = "model.safetensors";
inline constexpr const char* kIndexFile = "model.safetensors.index.json";
/// Those of PEFT, for adapters.
inline constexpr const char* kAdapterFile = "adapter_model.safetensors";
inline constexpr const char* kAdapterConfig = "adapter_config.json";

/// The safetensors of a Hugging Face model folder: model.safetensors, or the shards that
/// model.safetensors.index.json names. All headers are read and checked against the index at once;
/// the index is not trusted: a shard is a file of this folder, not a path and not a link out of it
/// (links into the blobs of a Hugging Face cache are followed). Throws Error, naming the file; also
/// for a folder with an adapter, which other programs load with the model that it names.
class ModelFiles {
 public:
  explicit ModelFiles(const std::filesystem::path& folder);

  /// Every tensor and the file that holds it.
  const std::map<std::string, const SafetensorsFile*>& tensors() const { return tensors_; }
  const std::filesystem::path& folder() const { return folder_; }

 private:
  void open_single();
  void open_index();

  std::filesystem::path folder_;
  /// A deque: `tensors_` points to its elements while more are added.
  std::deque<SafetensorsFile> files_;
  std::map<std::string, const SafetensorsFile*> tensors_;
};

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
