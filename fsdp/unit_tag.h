#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace tessera::fsdp {

/// Elements behind a flat buffer that tell its unit from others.
constexpr std::int64_t kTagNumel = 4;

/// The tag of the unit that messages call `label`, (kTagNumel) int8: numbers from 0 to 127, which
/// every type holds exactly.
at::Tensor tag_of(const std::string& label);

}  // namespace tessera::fsdp
