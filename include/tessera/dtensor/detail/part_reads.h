#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {

/// Why a plain tensor is not the part of one rank's that it is taken for.
struct PartRead {
  enum class How : std::uint8_t {
    kAcross,     ///< an operator read across a dimension of which each rank has a part
    kUnknown,    ///< what an operator made of a part is not known
    kPiece,      ///< a piece of what is split (one head) was taken for all
    kReordered,  ///< it is split along another dimension, or not in order along this one
  };
  How how = How::kAcross;
  std::string name;                 ///< of the operator; empty: none
  std::vector<std::int64_t> sizes;  ///< of its argument; if it is not kAcross, of the tensor
  std::int64_t dim = 0;             ///< the one that is split
  at::Tensor parameter;  ///< whose rows are the argument's features; undefined: not found
  std::string why;       ///< kUnknown: more of it
};

/// An operator that read across a dimension, or reordered it, by which `tensor` was computed from
/// the local tensors that distributed ones gave away (to_local). What a program's own autograd
/// function reduces further (an all-reduce by hand) is believed. nullopt: there is none, or none
/// is known by autograd's graph. Not collective.
std::optional<PartRead> part_read(const at::Tensor& tensor);

/// The same, or why `tensor` is not this rank's share along `dim`, in order, of what one rank
/// computes. What a program's own autograd function made is believed to be.
std::optional<PartRead> not_a_share(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    std::int64_t dim);

/// Whether `tensor` is a part of what one rank computes, as far as is known.
bool is_part(const at::Tensor& tensor);

/// A leaf for which `counts` holds, and that was computed with a part along a dimension that is
/// split, so that its gradient on each rank is that of the part. Undefined: as above. Not
/// collective.
at::Tensor leaf_met_by_part(const at::Tensor& tensor,
                            const std::function<bool(const at::Tensor& leaf)>& counts);

}  // namespace tessera::detail
