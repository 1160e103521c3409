#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/nn/linear.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// One of the Linears that a FusedLinear replaces.
struct FusedPart {
  std::string name;  ///< name of the replaced Linear in files: "q_proj"
  std::int64_t out_features = 0;
};

/// Options of a FusedLinear.
struct FusedLinearOptions {
  bool bias = true;
  /// The weight's rows are divided into this number of equal groups, each with an equal share of
  /// every part. For grouped-query attention, set `groups` to the number of key and value heads. A
  /// group is then one key head, one value head and the query heads that use this key head, and
  /// tensor-parallel ranks get whole groups. With 1 group, the weight has all rows of the first
  /// part, then all rows of the second part, and so on.
  std::int64_t groups = 1;
};

/// Several Linears of the same input, fused into one larger product: query, key and value, or gate
/// and up. Files store the parts under their own names (load_hugging_face):
///
///   nn::FusedLinear qkv(dim, {{"q_proj", heads * size}, {"k_proj", kv_heads * size},
///                             {"v_proj", kv_heads * size}}, {.bias = false, .groups = kv_heads});
///   const std::vector<at::Tensor> parts = qkv.split(qkv(x));  // q, k, v
///
/// For tensor parallelism use fused_colwise_parallel. FSDP treats the weight like any parameter.
/// The order of rows is that of linear_qkv in Megatron-LM.
class FusedLinear : public Linear {
 public:
  /// Throws Error if `groups` does not divide a part's out_features.
  FusedLinear(std::int64_t in_features, std::vector<FusedPart> parts,
              FusedLinearOptions options = {});

  /// Splits a result of forward into its parts, (..., out_features) each. If `output` is only this
  /// rank's share of the result, the function returns this rank's shares of the parts. The parts
  /// are views if `groups` is 1.
  std::vector<at::Tensor> split(const at::Tensor& output) const;

  const std::vector<FusedPart>& parts() const { return parts_; }
  std::int64_t groups() const { return groups_; }

 private:
  std::vector<FusedPart> parts_;
  std::int64_t groups_;
};

}  // namespace tessera::nn
TESSERA_API_END
