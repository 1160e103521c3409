#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "comm/data_mesh.h"
#include "parameter/sharded_parameter.h"
#include "parameter_group/flat_buffer_layout.h"

namespace tessera::fsdp {

/// The permanent state of a group: its parameters' shards, laid out in memory.
class ParameterGroupShards {
 public:
  /// Parameters of one type on one mesh, at least one.
  ParameterGroupShards(std::vector<ShardedParameter> parameters, const DataMesh& mesh,
                       const MixedPrecisionPolicy& policy);

  std::vector<ShardedParameter>& parameters() { return parameters_; }
  const std::vector<ShardedParameter>& parameters() const { return parameters_; }
  const DataMesh& mesh() const { return mesh_; }
  const FlatBufferLayout& layout() const { return layout_; }
  /// This rank's shards, one after another; undefined unless layout().has_flat() and laid out.
  const at::Tensor& flat() const { return flat_; }

  /// Takes over tensors that were put into the slots since; true if there were any. Throws Error
  /// for one whose layout differs from its shard's.
  bool adopt();
  /// Whether the shards are still where lay_out() put them: one that was converted or replaced does
  /// not.
  bool laid_out() const;
  /// Takes the types anew, since a model may be converted after it was sharded, and puts the shards
  /// into a flat buffer. Throws Error, naming them, for parameters that are still on the meta
  /// device or on another one than they should be, and if only a part of the group was converted.
  void lay_out();
  /// Grows with each write to a shard that autograd sees.
  std::uint64_t versions() const;
  /// See ParameterGroup.
  void begin_use();
  std::string lost_write() const;
  /// Whether a slot holds neither its shard nor the unsharded tensor.
  bool any_replaced() const;

 private:
  void check_devices() const;
  void check_types() const;

  std::vector<ShardedParameter> parameters_;
  DataMesh mesh_;
  MixedPrecisionPolicy policy_;
  FlatBufferLayout layout_;
  at::Tensor flat_;
};

}  // namespace tessera::fsdp
