#include "tessera/dtensor/sharding_spec.h"

#include <ostream>

#include "tensor/local_part.h"

namespace tessera {

std::ostream& operator<<(std::ostream& stream, const ShardingSpec& spec) {
  return stream << spec.mesh << ", " << spec.layout;
}

bool detail::IsDistributed::operator()(const at::Tensor& tensor) const {
  return tensor.defined() && detail::as_distributed(tensor) != nullptr;
}

const ShardingSpec& sharding_spec(const at::Tensor& tensor) {
  return detail::impl_of_distributed(tensor).spec()->sharding;
}

const at::Tensor& local_tensor(const at::Tensor& tensor) {
  const auto* impl = tensor.defined() ? detail::as_distributed(tensor) : nullptr;
  if (impl == nullptr) {
    return tensor;
  }
  detail::check_readable(*impl, "local_tensor()");
  return impl->local();
}

/// Not compared between ranks: layers of the library call it in the middle of a step, with sizes
/// that ranks have agreed on.
at::Tensor make_distributed(const at::Tensor& local, const ShardingSpec& spec,
                            std::vector<std::int64_t> sizes) {
  detail::check_local(local, spec, sizes);
  return detail::wrap_local(detail::dense_local(local.detach(), spec, sizes), spec, sizes);
}

}  // namespace tessera
