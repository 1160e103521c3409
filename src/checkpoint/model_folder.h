// The folder of a Hugging Face model: reads its files, and exports a model to the folder.

#pragma once

#include <ATen/core/Tensor.h>

#include <deque>

#include "format.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

inline constexpr const char* kSingleFile = "model.safetensors";
inline constexpr const char* kIndexFile = "model.safetensors.index.json";
/// The names of the files in which PEFT saves adapters.
inline constexpr const char* kAdapterFile = "adapter_model.safetensors";
inline constexpr const char* kAdapterConfig = "adapter_config.json";

/// The weights of a Hugging Face model folder: one file, or shards with an index. The constructor
/// checks all headers. Throws Error for shards outside the folder (except in a Hugging Face cache)
/// and for folders with an adapter.
class ModelFiles {
 public:
  explicit ModelFiles(const std::filesystem::path& folder);

  /// Returns the tensors by name, each with the file that stores the tensor.
  const std::map<std::string, const SafetensorsFile*>& tensors() const { return tensors_; }
  const std::filesystem::path& folder() const { return folder_; }

 private:
  void open_single();
  void open_index();

  std::filesystem::path folder_;
  /// The opened files. A deque does not move its elements when it grows, so the pointers in
  /// `tensors_` stay valid.
  std::deque<SafetensorsFile> files_;
  std::map<std::string, const SafetensorsFile*> tensors_;
};

/// Throws Error if weights of `bytes` bytes cannot be exported to `folder`. Reasons: permissions,
/// free space, a different configuration, or a mix of model and adapter. Writes nothing.
/// `config_file`: the file name of the configuration.
void check_export_folder(const std::filesystem::path& folder, const std::string& config_json,
                         std::int64_t bytes, const char* config_file = "config.json");

/// Returns `config_json` with the dtype of the exported weights. Adds no dtype for fp32, because
/// readers assume fp32. Throws Error for a dtype that exports do not support.
std::string config_of_weights(const std::string& config_json, c10::ScalarType dtype);

std::int64_t bytes_of_all(const std::vector<SafetensorsWriter::Item>& items);

/// The files of one export, on the rank that writes the files. Until publish(), only temporary
/// files exist.
class ExportFolder {
 public:
  /// Opens all files and reserves their disk space, so that a full disk is detected before any data
  /// is sent.
  ExportFolder(const std::filesystem::path& folder,
               const std::vector<SafetensorsWriter::Item>& items, std::string config_json,
               std::int64_t max_shard_bytes);

  void write(const std::string& name, std::span<const std::int64_t> offset,
             const at::Tensor& block);

  /// Gives the export's files their final names. One rename, of the single file or of the index,
  /// replaces the older model. A reader never gets weights of both models.
  void publish();

 private:
  std::string shard_prefix() const;
  std::string index_json() const;
  void remove(const std::string& name) const;
  void remove_older_shards() const;

  std::filesystem::path folder_;
  std::string config_json_;
  std::vector<std::string> names_;
  std::vector<SafetensorsWriter> writers_;
  std::map<std::string, std::size_t> shard_of_;
  std::int64_t total_bytes_ = 0;
};

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END
