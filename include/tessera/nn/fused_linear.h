#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/linear.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// One of the Linears that a FusedLinear takes the place of.
struct FusedPart {
  std::string name;  ///< the module's name in files: "q_proj"
  std::int64_t out_features = 0;
};

/// Options of a FusedLinear.
struct FusedLinearOptions {
  bool bias = true;
  /// The rows of the weight are so many equal groups, each with its share of every part. For
  /// grouped-query attention the number of key and value heads: a group is a key head, a value head
  /// and the query heads that use them, so that ranks of tensor parallelism get whole groups. 1:
  /// all rows of the first part, then all of the second.
  std::int64_t groups = 1;
};

/// Several Linears of one input as one, which makes one larger product of them: query, key and
/// value, or gate and up. Files hold the parts under their own names (load_hugging_face):
///
///   nn::FusedLinear qkv(dim, {{"q_proj", heads * size}, {"k_proj", kv_heads * size},
///                             {"v_proj", kv_heads * size}}, {.bias = false, .groups = kv_heads});
///   const std::vector<at::Tensor> parts = qkv.split(qkv(x));  // q, k, v
///
/// Under tensor parallelism with fused_colwise_parallel, under FSDP like any parameter. Megatron-LM
/// has the same order of rows in its linear_qkv.
class FusedLinear : public Linear {
 public:
  /// Throws Error where `groups` does not divide a part's out_features.
  FusedLinear(std::int64_t in_features, std::vector<FusedPart> parts,
              FusedLinearOptions options = {});

  /// The parts of a result of forward, (..., out_features) each; of a rank's share of the result,
  /// its shares. Views where `groups` is 1.
  std::vector<at::Tensor> split(const at::Tensor& output) const;

  const std::vector<FusedPart>& parts() const { return parts_; }
  std::int64_t groups() const { return groups_; }

 private:
  std::vector<FusedPart> parts_;
  std::int64_t groups_;
};

}  // namespace tessera::nn
TESSERA_API_END
