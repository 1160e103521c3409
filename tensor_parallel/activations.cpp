#include "activations.h"

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::tensor_parallel {
namespace {

DistributedTensor move(const DistributedTensor& tensor, const Placement& wanted) {
  const ShardingSpec& spec = tensor.spec();
  const LayoutPtr layout = to_layout(spec.layout->mesh_sizes(), {wanted}, tensor.tensor().sizes());
  return spec.layout == layout ? tensor : tensor.redistribute(layout);
}

}  // namespace

at::Tensor enter(const at::Tensor& tensor, const DeviceMesh& mesh, const Placement& given,
                 const Placement& wanted, std::optional<std::vector<std::int64_t>> sizes) {
  TESSERA_CHECK(tensor.defined(),
                "a tensor-parallel style was given an undefined tensor; leave it out of the plan");
  if (!tessera::is_distributed(tensor)) {
    return move(DistributedTensor::from_local(tensor, mesh, {given}, std::move(sizes)), wanted);
  }
  const DistributedTensor distributed(tensor);
  TESSERA_CHECK(distributed.mesh() == mesh, "a tensor-parallel style on ", to_string(mesh),
                " was given a tensor on ", to_string(distributed.mesh()),
                "; pass a tensor of the style's mesh, or its to_local()");
  return move(distributed, wanted);
}

at::Tensor leave(const at::Tensor& tensor, const Placement& wanted, bool local) {
  const DistributedTensor moved = move(DistributedTensor(tensor), wanted);
  return local ? moved.to_local() : moved.tensor();
}

}  // namespace tessera::tensor_parallel
