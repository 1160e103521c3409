#include "tessera/dtensor/distributed_tensor.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "agreement.h"
#include "autograd_functions.h"
#include "below_autograd.h"
#include "distributed_impl.h"
#include "other_mesh.h"
#include "reducible.h"
#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"

namespace tessera {
namespace {

const detail::DistributedTensorImpl& impl_of(const at::Tensor& tensor) {
  TESSERA_CHECK(tensor.defined(), "a distributed tensor was expected, found an undefined one");
  const auto* impl = detail::as_distributed(tensor);
  TESSERA_CHECK(impl != nullptr, "a distributed tensor was expected, found a plain one of sizes ",
                tensor.sizes(), ": wrap it with from_local or distribute_tensor");
  return *impl;
}

/// The global sizes of even shards of `local` sizes.
std::vector<std::int64_t> even_global_sizes(const at::Tensor& local, const DeviceMesh& mesh,
                                            const Placements& placements) {
  auto sizes = local.sizes().vec();
  for (std::size_t i = 0; i < placements.size(); ++i) {
    const auto* shard = std::get_if<Shard>(&placements[i]);
    TESSERA_CHECK(!std::holds_alternative<StridedShard>(placements[i]),
                  "from_local with a strided shard needs the global sizes: pass `sizes`");
    if (shard == nullptr) continue;
    const auto dim = shard->dim < 0 ? shard->dim + local.dim() : shard->dim;
    TESSERA_CHECK(dim >= 0 && dim < local.dim(), "from_local: ", to_string(placements[i]),
                  " of a tensor of ", local.dim(), " dimensions");
    sizes[static_cast<std::size_t>(dim)] *= mesh.size(static_cast<int>(i));
  }
  return sizes;
}

void check_local(const at::Tensor& local, const ShardingSpec& spec,
                 const std::vector<std::int64_t>& sizes) {
  TESSERA_CHECK(!tessera::is_distributed(local),
                "from_local of a tensor that is distributed already: "
                "redistribute() changes its placements");
  detail::check_partials(*spec.layout, local.scalar_type(), "from_local");
  const auto expected = detail::local_sizes(spec, sizes);
  TESSERA_CHECK(local.sizes() == expected, "from_local: rank ", spec.mesh.world()->rank(), " of ",
                to_string(spec.mesh), " holds ", c10::IntArrayRef(expected), " of a tensor of ",
                c10::IntArrayRef(sizes), " as ", detail::describe(*spec.layout, sizes), ", found ",
                local.sizes(), ": with uneven shards pass the global sizes");
}

DistributedTensor wrap_local(const at::Tensor& local, const ShardingSpec& spec,
                             const std::vector<std::int64_t>& sizes, LayoutPtr gradient) {
  check_local(local, spec, sizes);
  return DistributedTensor(detail::from_local_with_gradient(local, spec, sizes, gradient));
}

}  // namespace

DistributedTensor::DistributedTensor(at::Tensor tensor) : tensor_(std::move(tensor)) {
  impl_of(tensor_);
}

DistributedTensor DistributedTensor::from_local(const at::Tensor& local, const DeviceMesh& mesh,
                                                const Placements& placements,
                                                std::optional<std::vector<std::int64_t>> sizes,
                                                std::optional<Placements> grad_placements) {
  return detail::make_agreed(mesh, [&] {
    TESSERA_CHECK(placements.size() == static_cast<std::size_t>(mesh.ndim()),
                  "from_local: ", placements.size(), " placements for ", to_string(mesh),
                  ": give one per dimension");
    if (!sizes) sizes = even_global_sizes(local, mesh, placements);
    const auto layout = to_layout(mesh.shape().sizes(), placements, *sizes);
    const auto gradient = grad_placements
                              ? to_layout(mesh.shape().sizes(), *grad_placements, *sizes)
                              : detail::gradient_layout(layout);
    return wrap_local(local, {mesh, layout}, *sizes, gradient);
  });
}

DistributedTensor DistributedTensor::from_local(const at::Tensor& local, const ShardingSpec& spec,
                                                std::vector<std::int64_t> sizes) {
  return detail::make_agreed(spec.mesh, [&] {
    return wrap_local(local, spec, sizes, detail::gradient_layout(spec.layout));
  });
}

at::Tensor DistributedTensor::to_local(std::optional<Placements> grad_placements) const {
  const auto& spec = impl_of(tensor_).spec();
  const auto gradient = grad_placements ? to_layout(spec->sharding.mesh.shape().sizes(),
                                                    *grad_placements, spec->sizes)
                                        : detail::gradient_layout(spec->sharding.layout);
  return detail::to_local_with_gradient(tensor_, gradient);
}

DistributedTensor DistributedTensor::redistribute(const Placements& placements) const {
  const auto& spec = impl_of(tensor_).spec();
  return redistribute(to_layout(spec->sharding.mesh.shape().sizes(), placements, spec->sizes));
}

DistributedTensor DistributedTensor::redistribute(LayoutPtr layout) const {
  detail::check_partials(*layout, tensor_.scalar_type(), "redistribute");
  return DistributedTensor(detail::redistribute_with_gradient(tensor_, {mesh(), layout}));
}

DistributedTensor DistributedTensor::redistribute(const Placements& placements,
                                                  const RedistributeOptions& options) const {
  return redistribute(mesh(), placements, options);
}

DistributedTensor DistributedTensor::redistribute(const DeviceMesh& mesh,
                                                  const Placements& placements,
                                                  const RedistributeOptions& options) const {
  const auto source = options.forward_dtype ? tensor_.to(*options.forward_dtype) : tensor_;
  const auto target = to_layout(mesh.shape().sizes(), placements, impl_of(source).spec()->sizes);
  detail::check_partials(*target, source.scalar_type(), "redistribute");
  return DistributedTensor(detail::redistribute_with_gradient(source, {mesh, target}, options));
}

at::Tensor DistributedTensor::full_tensor(std::optional<Placements> grad_placements) const {
  const auto own = layout();
  return redistribute(Layout::replicated(own->mesh_sizes(), own->tensor_ndim()))
      .to_local(std::move(grad_placements));
}

Placements DistributedTensor::placements() const {
  const auto& spec = *impl_of(tensor_).spec();
  return to_placements(*spec.sharding.layout, spec.sizes);
}

LayoutPtr DistributedTensor::layout() const {
  return spec().layout;
}
const ShardingSpec& DistributedTensor::spec() const {
  return sharding_spec(tensor_);
}
const DeviceMesh& DistributedTensor::mesh() const {
  return spec().mesh;
}

bool is_distributed(const at::Tensor& tensor) {
  return tensor.defined() && detail::as_distributed(tensor) != nullptr;
}

const ShardingSpec& sharding_spec(const at::Tensor& tensor) {
  return impl_of(tensor).spec()->sharding;
}

const at::Tensor& local_tensor(const at::Tensor& tensor) {
  const auto* impl = tensor.defined() ? detail::as_distributed(tensor) : nullptr;
  if (impl == nullptr) return tensor;
  detail::check_readable(*impl, "local_tensor()");
  return impl->local();
}

at::Tensor make_distributed(const at::Tensor& local, const ShardingSpec& spec,
                            std::vector<std::int64_t> sizes) {
  return wrap_local(local.detach(), spec, sizes, detail::gradient_layout(spec.layout));
}

DistributedTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    const Placements& placements) {
  return detail::make_agreed(mesh, [&] {
    TESSERA_CHECK(!tessera::is_distributed(tensor),
                  "distribute_tensor of a tensor that is distributed "
                  "already: redistribute() changes its placements");
    const auto sizes = tensor.sizes().vec();
    const auto& mesh_sizes = mesh.shape().sizes();
    const auto target = to_layout(mesh_sizes, placements, sizes);
    detail::check_partials(*target, tensor.scalar_type(), "distribute_tensor");
    const auto whole = Layout::replicated(mesh_sizes, static_cast<int>(tensor.dim()));
    return wrap_local(tensor, {mesh, whole}, sizes, whole).redistribute(target);
  });
}

DistributedTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    const Placements& placements,
                                    const DistributeOptions& options) {
  if (!options.source) return distribute_tensor(tensor, mesh, placements);
  const auto sizes = tensor.sizes().vec();
  // What this rank will have: ranks that disagree on it would wait for one another in the scatter.
  const auto room = detail::make_agreed(mesh, [&] {
    const ShardingSpec target{mesh, to_layout(mesh.shape().sizes(), placements, sizes)};
    detail::check_partials(*target.layout, tensor.scalar_type(), "distribute_tensor");
    TESSERA_CHECK(*options.source >= 0 && *options.source < mesh.size(), "distribute_tensor from ",
                  *options.source, " of ", to_string(mesh), ": give 0 to ", mesh.size() - 1);
    const auto none = at::empty(detail::local_sizes(target, sizes), tensor.options());
    return wrap_local(none, target, sizes, detail::gradient_layout(target.layout));
  });
  const comm::CallerScope caller("distribute_tensor");
  const auto part = detail::scatter_from(tensor.detach(), *options.source, room.spec());
  return DistributedTensor(make_distributed(part, room.spec(), sizes));
}

}  // namespace tessera
