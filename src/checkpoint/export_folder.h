// The folder that an export writes, and how parameters reach the rank that writes it.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "parameters.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/comm/world.h"
#include "tessera/export.h"
#include "tessera/nn/parameter.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::checkpoint {

/// Throws Error if an export of so many bytes of weights with this configuration cannot be written
/// to `folder`: it cannot be made or written, its file system has too little room, or it holds a
/// model of another configuration, or an adapter (for the export of an adapter: a model). Makes
/// nothing. `config_file`: the configuration's name there.
void check_export_folder(const std::filesystem::path& folder, const std::string& config_json,
                         std::int64_t bytes, const char* config_file = "config.json");

/// The configuration with the exported type of the weights, if it names a type or readers would
/// assume another. Throws Error for a type that weights are not exported in.
std::string config_of_weights(const std::string& config_json, c10::ScalarType dtype);

/// The configuration with the type "llama", which readers need, if it has none and the tensors have
/// a Llama's names.
std::string with_model_type(const std::string& config_json,
                            const std::vector<SafetensorsWriter::Item>& items);

/// Whether the configuration says that embedding and head are two, while the head is among the
/// embedding's other names: readers draw the head anew.
bool lacks_head(const std::string& config_json, const std::vector<std::string>& tied);

/// Whether the configuration says that embedding and head are one, while the tensors of an export
/// are both: readers drop the head's.
bool drops_head(const std::string& config_json, const std::vector<SafetensorsWriter::Item>& items);
inline constexpr const char* kEmbedding = "model.embed_tokens.weight";
inline constexpr const char* kHead = "lm_head.weight";

/// The bytes of the values of tensors.
std::int64_t bytes_of_all(const std::vector<SafetensorsWriter::Item>& items);

/// The files of one export, on the rank that writes them. Until publish(), nothing but temporary
/// files exists.
class ExportFolder {
 public:
  /// Opens all files, and reserves room for them on the disk: a full disk shows before anything is
  /// sent.
  ExportFolder(const std::filesystem::path& folder,
               const std::vector<SafetensorsWriter::Item>& items, std::string config_json,
               std::int64_t max_shard_bytes);

  void write(const std::string& name, std::span<const std::int64_t> offset,
             const at::Tensor& block);

  /// A reader that opens the folder at any moment, or after a crash, finds either the older model
  /// or the new one, complete. One rename decides: that of the single file or of the index. Shards
  /// never take the name of an older shard, and those of the older model are removed last, so that
  /// a reader that has opened the older index finds its shards or none.
  void publish();

 private:
  std::string shard_prefix() const;
  std::string index_json() const;
  void remove(const std::string& name) const;
  void remove_older_shards() const;

  std::filesystem::path folder_;
  std::string config_json_;
  std::vector<std::string> names_;
  std::vector<SafetensorsWriter> writers_;  ///< in the order of `names_`
  std::map<std::string, std::size_t> shard_of_;
  std::int64_t total_bytes_ = 0;
};

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END

namespace tessera::checkpoint {

/// A parameter and the tensors of files that hold it.
struct SentParameter {
  nn::SlotPtr slot;
  std::vector<StoredTensor> tensors;
};

/// Each under its first name.
std::vector<SentParameter> sent_by_name(const std::vector<NamedParameter>& parameters);

/// The type in which floating-point values are written; none: fp32, which holds every value of the
/// 16-bit types, but fp64 for fp64.
using SentType = std::optional<c10::ScalarType>;

/// The tensors of files. Throws Error for parameters that cannot be saved.
std::vector<SafetensorsWriter::Item> items_of(const std::vector<SentParameter>& parameters,
                                              SentType dtype = {});

/// Writes on rank 0. After a failing write it continues to receive, so that its peers don't wait
/// for it.
class Receiver {
 public:
  using Write = std::function<void(const std::string& name, std::span<const std::int64_t> offset,
                                   const at::Tensor& block)>;
  explicit Receiver(Write write) : write_(std::move(write)) {}

  void write(const std::string& name, std::span<const std::int64_t> offset,
             const at::Tensor& block);
  /// Throws the first failure.
  void check() const;

 private:
  Write write_;
  std::exception_ptr failure_;
};

/// Sends the parameters to rank 0, whose receiver gets them under the names of items_of(), a
/// bounded number of bytes at a time. Collective.
void send_all(const std::vector<SentParameter>& parameters, comm::World& world, Receiver& receiver,
              SentType dtype = {});

}  // namespace tessera::checkpoint
