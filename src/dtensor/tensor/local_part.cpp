// Checks and properties of every distributed tensor that is made from a local one.

#include "tensor/local_part.h"

#include "tessera/core/error.h"
#include "tessera/internals/detail/alias_tensor.h"

namespace tessera::detail {

const DistributedTensorImpl& impl_of_distributed(const at::Tensor& tensor) {
  TESSERA_CHECK(tensor.defined(), "a distributed tensor was expected, found an undefined one");
  const auto* impl = as_distributed(tensor);
  TESSERA_CHECK(impl != nullptr, "a distributed tensor was expected, found a plain one of sizes ",
                tensor.sizes(), ": wrap it with from_local or distribute_tensor");
  return *impl;
}

void check_not_distributed(const at::Tensor& local) {
  TESSERA_CHECK(!tessera::is_distributed(local),
                "from_local of a tensor that is distributed already: "
                "redistribute() changes its placements");
}

void check_local(const at::Tensor& local, const ShardingSpec& spec,
                 const std::vector<std::int64_t>& sizes) {
  check_not_distributed(local);
  check_partials(*spec.layout, local.scalar_type(), "from_local");
  const auto expected = local_sizes(spec, sizes);
  TESSERA_CHECK(local.sizes() == expected, "from_local: rank ", spec.mesh.world()->rank(), " of ",
                to_string(spec.mesh), " holds ", c10::IntArrayRef(expected), " of a tensor of ",
                c10::IntArrayRef(sizes), " as ", describe(*spec.layout, sizes), ", found ",
                local.sizes(), ": with uneven shards pass the global sizes");
}

at::Tensor dense_local(const at::Tensor& local, const ShardingSpec& sharding,
                       c10::IntArrayRef sizes) {
  const bool agreed = shards_agree_on_stride_order(*sharding.layout, sizes);
  return !local.is_non_overlapping_and_dense() || (!agreed && !local.is_contiguous())
             ? local.contiguous()
             : local;
}

at::Tensor wrap_local(const at::Tensor& local, const ShardingSpec& sharding,
                      c10::IntArrayRef sizes) {
  const bool agreed = shards_agree_on_stride_order(*sharding.layout, sizes);
  auto strides = global_strides(sizes, local.strides(), agreed);
  return wrap(alias_tensor(local),
              intern_spec({sharding, sizes.vec(), std::move(strides), local.scalar_type()}));
}

}  // namespace tessera::detail
