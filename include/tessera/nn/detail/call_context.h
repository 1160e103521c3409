#pragma once

#include <functional>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

/// Attached to a module by a higher layer: what an error that passes a call of it, or of a module
/// below, is said to be in: "unit 'layers.0'".
struct CallContext {
  std::function<std::string()> text;
};

}  // namespace tessera::nn::detail
TESSERA_API_END
