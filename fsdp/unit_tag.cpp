#include "unit_tag.h"

#include <ATen/ops/zeros.h>

#include <functional>

namespace tessera::fsdp {

at::Tensor tag_of(const std::string& label) {
  at::Tensor tag = at::zeros({kTagNumel}, at::kChar);
  std::size_t hash = std::hash<std::string>()(label);
  for (std::int64_t i = 0; i < kTagNumel; ++i, hash >>= 7) {
    tag.data_ptr<std::int8_t>()[i] = static_cast<std::int8_t>(hash & 0x7f);
  }
  return tag;
}

}  // namespace tessera::fsdp
