#pragma once

#include <ATen/core/Tensor.h>

#include <any>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::fsdp {

/// What a shard is sent as.
struct EncodedShard {
  std::vector<at::Tensor> tensors{};  ///< of any types
  std::any metadata{};                ///< stays on this rank, for post_all_gather
};

/// Gathers a parameter as something else than its values: in 8 bits with a scale, for example. Both
/// functions or neither; they are called with gradients off, in the thread of forward and backward,
/// and are not collective. On one rank, where nothing is gathered, neither is called; nor are they
/// for a gather on the post-forward mesh, whose ranks keep values. FSDP2's fsdp_pre_all_gather and
/// fsdp_post_all_gather. In bfloat16, for all weights:
///   options.all_gather_extension = [](const std::string& name, const at::Tensor&) {
///     return name.ends_with("weight")
///                ? std::optional(fsdp::AllGatherExtension{
///                      .pre_all_gather = [](const at::Tensor& shard) -> fsdp::EncodedShard {
///                        return {.tensors = {shard.to(at::kBFloat16)}};
///                      },
///                      .post_all_gather = [](const std::vector<at::Tensor>& tensors,
///                                            const std::any&) { return tensors[0]; }})
///                : std::nullopt;
///   };
struct AllGatherExtension {
  /// This rank's shard, in the parameter's own type and of the same sizes on every rank: one that
  /// is shorter, or empty, is padded with zeros. It must not be written to. The tensors returned
  /// must have the same number, sizes and types on every rank.
  std::function<EncodedShard(const at::Tensor& shard)> pre_all_gather{};
  /// tensors[i]: (ranks, sizes of what pre_all_gather returned as tensors[i]). Returns the shards
  /// of all ranks: (ranks, sizes of the padded shard), of any type; it is cast to that of
  /// computation.
  std::function<at::Tensor(const std::vector<at::Tensor>& tensors, const std::any& metadata)>
      post_all_gather{};
};

/// The extension of a parameter (by its name within the unit); nullopt: its values are gathered. It
/// is called once, within fully_shard, and must return the same on every rank.
using ExtensionFunction = std::function<std::optional<AllGatherExtension>(
    const std::string& name, const at::Tensor& parameter)>;

}  // namespace tessera::fsdp
TESSERA_API_END
