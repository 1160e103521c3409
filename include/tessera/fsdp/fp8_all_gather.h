#pragma once

#include <c10/core/ScalarType.h>

#include "tessera/export.h"
#include "tessera/fsdp/all_gather_extension.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::fsdp {

/// Gathers the weights that nn::convert_to_fp8 has converted in eight bits, with an fp32 scale for
/// each row: what the forward product makes of them anyway. `param_dtype` is the units' type of
/// computation, fp32 or bf16: their MixedPrecisionPolicy::param_dtype. Weights that are split by
/// rows, as by default, come out so that every product is that of one rank, bit for bit; other
/// parameters are sent as values.
///
///   nn::convert_to_fp8(model, {.exclude = {"lm_head"}});
///   options.all_gather_extension = fsdp::fp8_all_gather(model, at::kBFloat16);
///   fsdp::fully_shard(...);
///
/// Call it after convert_to_fp8. Not collective. Throws Error for another type.
ExtensionFunction fp8_all_gather(const nn::ModuleBase& model, c10::ScalarType param_dtype);

}  // namespace tessera::fsdp
TESSERA_API_END
