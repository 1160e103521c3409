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
/// The file names that PEFT uses for adapters.
inline constexpr const char* kAdapterFile = "adapter_model.safetensors";
inline constexpr const char* kAdapterConfig = "adapter_config.json";

/// The weights of a Hugging Face model folder: model.safetensors, or the shards listed in
/// model.safetensors.index.json. The constructor reads all headers and checks them against the
/// index. The index is not trusted: a shard must be a file in this folder, not a path or a link out
/// of the folder (links into the blobs of a Hugging Face cache are followed). Throws Error with the
/// file's name. Also throws Error for a folder with an adapter, which other programs would load
/// together with its base model.
class ModelFiles {
 public:
  explicit ModelFiles(const std::filesystem::path& folder);

  /// Every tensor by name, with the file that stores the tensor.
  const std::map<std::string, const SafetensorsFile*>& tensors() const { return tensors_; }
  const std::filesystem::path& folder() const { return folder_; }

 private:
  void open_single();
  void open_index();

  std::filesystem::path folder_;
  /// The opened files, in a deque, because `tensors_` has pointers to the elements while elements
  /// are added.
  std::deque<SafetensorsFile> files_;
  std::map<std::string, const SafetensorsFile*> tensors_;
};

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
