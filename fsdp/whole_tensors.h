#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "packing.h"
#include "reusable_storage.h"

namespace tessera::fsdp {

/// The whole tensors of a group, in one storage that comes and goes.
class WholeTensors {
 public:
  WholeTensors() = default;
  /// For the tensors of which `segments` are the shards, not allocated. `padded`: each has room for
  /// all ranks' padded shards (split on dimension 0), so that an all-gather can write into it. The
  /// storage can be cut into `pieces` equal ones.
  WholeTensors(const std::vector<Segment>& segments, c10::ScalarType dtype, c10::Device device,
               bool padded, std::int64_t pieces);

  bool allocated() const { return storage_.allocated(); }
  void allocate() { storage_.allocate(); }
  void free() { storage_.free(); }

  /// All of the storage.
  const at::Tensor& flat() const { return flat_; }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  /// If padded: each tensor with the padding behind it, flat.
  const std::vector<at::Tensor>& padded() const { return padded_; }

 private:
  ReusableStorage storage_;
  at::Tensor flat_;
  std::vector<at::Tensor> tensors_;
  std::vector<at::Tensor> padded_;
};

}  // namespace tessera::fsdp
