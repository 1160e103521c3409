// The folder of an export, and the transfer of parameters to the rank that writes it.

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

/// Throws Error if an export of `bytes` bytes of weights with this configuration cannot be written
/// to `folder`: if the folder cannot be created or written, if its file system has too little free
/// space, or if the folder has a model with another configuration or has an adapter. For the export
/// of an adapter, throws Error if the folder has a model. Writes nothing. `config_file`: the
/// configuration's file name.
void check_export_folder(const std::filesystem::path& folder, const std::string& config_json,
                         std::int64_t bytes, const char* config_file = "config.json");

/// Returns `config_json` with the type in which the weights are exported, if the configuration
/// names a type or readers would assume another type. Throws Error for a type that exports do not
/// support.
std::string config_of_weights(const std::string& config_json, c10::ScalarType dtype);

/// Returns `config_json` with "model_type": "llama", which readers need, if `config_json` has no
/// type and the tensors have the names of a Llama.
std::string with_model_type(const std::string& config_json,
                            const std::vector<SafetensorsWriter::Item>& items);

/// Whether the exported files lack the weights of the head: the configuration says that head and
/// embedding are untied, but in the model the head is tied to the embedding. Readers would
/// initialize a new head.
bool lacks_head(const std::string& config_json, const std::vector<std::string>& tied);

/// Whether readers would ignore the weights of the head: the configuration says that head and
/// embedding are tied, but the export has separate tensors for them.
bool drops_head(const std::string& config_json, const std::vector<SafetensorsWriter::Item>& items);
inline constexpr const char* kEmbedding = "model.embed_tokens.weight";
inline constexpr const char* kHead = "lm_head.weight";

/// The total number of bytes of the tensors' values.
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

  /// Makes the export visible. A reader that opens the folder at any moment, or after a crash,
  /// finds either the older or the new model, complete. The rename of the single file or of the
  /// index switches between the two models. New shards never take the name of an older shard. The
  /// shards of the older model are removed last, so a reader that has opened the older index either
  /// finds all shards of this index or gets an error.
  void publish();

 private:
  std::string shard_prefix() const;
  std::string index_json() const;
  void remove(const std::string& name) const;
  void remove_older_shards() const;

  std::filesystem::path folder_;
  std::string config_json_;
  std::vector<std::string> names_;
  std::vector<SafetensorsWriter> writers_;  ///< one writer per name in `names_`, in the same order
  std::map<std::string, std::size_t> shard_of_;
  std::int64_t total_bytes_ = 0;
};

}  // namespace tessera::checkpoint
TESSERA_API_FOR_TEST_END

namespace tessera::checkpoint {

/// A parameter, and the tensors that store the parameter in files.
struct SentParameter {
  nn::SlotPtr slot;
  std::vector<StoredTensor> tensors;
};

/// Lists the parameters, each under its first name.
std::vector<SentParameter> sent_by_name(const std::vector<NamedParameter>& parameters);

/// The type in which floating-point values are written. nullopt: fp64 for fp64 values, and fp32 for
/// all other values, because fp32 represents every 16-bit value exactly.
using SentType = std::optional<c10::ScalarType>;

/// The tensors to be written to files. Throws Error for parameters that cannot be saved.
std::vector<SafetensorsWriter::Item> items_of(const std::vector<SentParameter>& parameters,
                                              SentType dtype = {});

/// Writes tensors on rank 0. After a failed write, the receiver still accepts the remaining blocks,
/// so that the sending ranks do not wait forever.
class Receiver {
 public:
  using Write = std::function<void(const std::string& name, std::span<const std::int64_t> offset,
                                   const at::Tensor& block)>;
  explicit Receiver(Write write) : write_(std::move(write)) {}

  void write(const std::string& name, std::span<const std::int64_t> offset,
             const at::Tensor& block);
  /// Throws the error of the first failed write.
  void check() const;

 private:
  Write write_;
  std::exception_ptr failure_;
};

/// Sends the parameters to rank 0. `receiver` gets the parameters under the names of items_of(), in
/// pieces of bounded size. Collective over `world`.
void send_all(const std::vector<SentParameter>& parameters, comm::World& world, Receiver& receiver,
              SentType dtype = {});

}  // namespace tessera::checkpoint
