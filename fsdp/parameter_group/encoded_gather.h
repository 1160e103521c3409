#pragma once

#include <ATen/core/Tensor.h>

#include <any>
#include <optional>
#include <string>
#include <vector>

#include "parameter/sharded_parameter.h"
#include "tessera/fsdp/all_gather_extension.h"

namespace tessera::fsdp {

/// What a group sends if one of its parameters has an extension: the bytes of the tensors that
/// extensions made of the shards, and of the other shards themselves, one after another, each at a
/// multiple of kTensorAlignment.
class EncodedGather {
 public:
  /// Empty if no parameter has an extension. Values are sent as `dtype`.
  static std::optional<EncodedGather> of(const std::vector<ShardedParameter>& parameters,
                                         c10::ScalarType dtype);

  /// This rank's shards -> what is gathered: bytes, as numbers of 8 bytes.
  at::Tensor encode(const std::vector<at::Tensor>& shards);
  /// `numbers` (ranks, numbers), from what encode() returned last -> `unsharded`, a tensor of
  /// shape.sizes for each parameter. Throws Error if an extension returns other sizes than it
  /// should.
  void decode(const at::Tensor& numbers, const std::vector<at::Tensor>& unsharded);
  /// Frees the metadata: its tensors are the encoding lane's, which must have waited for decode().
  void drop_metadata();

 private:
  struct Piece {
    at::Tensor tensor;
    std::int64_t offset = 0;
  };
  struct Parameter {
    std::string name;
    ShardShape shape;
    AllGatherExtension extension;
    std::vector<Piece> pieces;  ///< between encode and decode
    std::any metadata;          ///< until drop_metadata
  };

  static at::Tensor padded(const at::Tensor& shard, const ShardShape& shape);
  static void assemble(const Parameter& parameter, const at::Tensor& shards,
                       const at::Tensor& unsharded);

  std::vector<Parameter> parameters_;
};

}  // namespace tessera::fsdp
