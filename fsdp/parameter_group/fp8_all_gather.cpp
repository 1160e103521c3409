#include "tessera/fsdp/fp8_all_gather.h"

#include <algorithm>
#include <string>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/kernels/fp8.h"
#include "tessera/nn/fp8.h"

namespace tessera::fsdp {
namespace {

/// Rounded to the type of computation first, as a weight that is gathered as values.
EncodedShard encode(const at::Tensor& shard, c10::ScalarType param_dtype) {
  kernels::Fp8Rows rows = kernels::quantize_fp8(shard.to(param_dtype));
  return {.tensors = {std::move(rows.values), std::move(rows.scales)}};
}

/// Scales are powers of two, so that the products are exact.
at::Tensor decode(const std::vector<at::Tensor>& tensors, c10::ScalarType param_dtype) {
  return kernels::dequantize_fp8({tensors[0], tensors[1]}, param_dtype);
}

}  // namespace

ExtensionFunction fp8_all_gather(const nn::ModuleBase& model, c10::ScalarType param_dtype) {
  TESSERA_CHECK(param_dtype == at::kFloat || param_dtype == at::kBFloat16,
                "fp8_all_gather of weights of type ", param_dtype,
                " was asked for; it takes float and bfloat16, which have the values of scaled "
                "8-bit numbers");
  const AllGatherExtension extension{
      .pre_all_gather =
          [param_dtype](const at::Tensor& shard) { return encode(shard, param_dtype); },
      .post_all_gather = [param_dtype](const std::vector<at::Tensor>& tensors,
                                       const std::any&) { return decode(tensors, param_dtype); }};
  return [weights = nn::fp8_weights(model), extension](
             const std::string&, const at::Tensor& parameter) -> std::optional<AllGatherExtension> {
    const auto is_parameter = [&](const auto& entry) {
      return entry.second->persistent().is_same(parameter);
    };
    return std::ranges::any_of(weights, is_parameter) ? std::optional(extension) : std::nullopt;
  };
}

}  // namespace tessera::fsdp
