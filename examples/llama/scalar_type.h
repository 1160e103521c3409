#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace llama {

/// The type that a flag names: "bf16", "fp16", else fp32. The command line has refused other names.
inline c10::ScalarType scalar_type(const std::string& name) {
  if (name == "bf16") {
    return c10::kBFloat16;
  }
  return name == "fp16" ? c10::kHalf : c10::kFloat;
}

}  // namespace llama
