// The public handle and the free functions beside it. Here arguments are checked, with messages in
// the caller's terms, and placements become layouts; the work itself is in autograd_functions.cpp.
// Functions that make a tensor go through make_agreed, so that in debug builds ranks that disagree
// all throw.

#include "tessera/dtensor/distributed_tensor.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <ostream>
#include <utility>
#include <variant>

#include "agreement/agreement.h"
#include "redistribute/redistribute.h"
#include "tensor/autograd_functions.h"
#include "tensor/distributed_impl.h"
#include "tessera/comm/trace.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/agreed_sizes.h"
#include "tessera/dtensor/detail/replica_agreement.h"

namespace tessera {
namespace {

/// Functions of a handle begin here: an empty handle and a plain tensor are one clear error each.
const detail::DistributedTensorImpl& impl_of(const at::Tensor& tensor) {
  TESSERA_CHECK(tensor.defined(), "a distributed tensor was expected, found an undefined one");
  const auto* impl = detail::as_distributed(tensor);
  TESSERA_CHECK(impl != nullptr, "a distributed tensor was expected, found a plain one of sizes ",
                tensor.sizes(), ": wrap it with from_local or distribute_tensor");
  return *impl;
}

void check_not_distributed(const at::Tensor& local) {
  TESSERA_CHECK(!tessera::is_distributed(local),
                "from_local of a tensor that is distributed already: "
                "redistribute() changes its placements");
}

void check_placements(const at::Tensor& local, const DeviceMesh& mesh,
                      const Placements& placements) {
  TESSERA_CHECK(placements.size() == static_cast<std::size_t>(mesh.ndim()),
                "from_local: ", placements.size(), " placements for ", to_string(mesh),
                ": give one per dimension");
  for (const Placement& placement : placements) {
    const auto* shard = std::get_if<Shard>(&placement);
    TESSERA_CHECK(shard == nullptr || (shard->dim >= -local.dim() && shard->dim < local.dim()),
                  "from_local: ", to_string(placement), " of a tensor of ", local.dim(),
                  " dimensions");
  }
}

/// The global sizes that the caller has not given.
std::vector<std::int64_t> sizes_of_whole(const at::Tensor& local, const DeviceMesh& mesh,
                                         const Placements& placements) {
  const auto strided = [](const Placement& placement) {
    return std::holds_alternative<StridedShard>(placement);
  };
  TESSERA_CHECK(std::ranges::none_of(placements, strided),
                "from_local with a strided shard needs the global sizes: pass `sizes`");
  return detail::agreed_sizes("from_local", local, mesh, placements);
}

/// What from_local refuses. Looks at this rank's tensor only and sends nothing.
void check_local(const at::Tensor& local, const ShardingSpec& spec,
                 const std::vector<std::int64_t>& sizes) {
  check_not_distributed(local);
  detail::check_partials(*spec.layout, local.scalar_type(), "from_local");
  const auto expected = detail::local_sizes(spec, sizes);
  TESSERA_CHECK(local.sizes() == expected, "from_local: rank ", spec.mesh.world()->rank(), " of ",
                to_string(spec.mesh), " holds ", c10::IntArrayRef(expected), " of a tensor of ",
                c10::IntArrayRef(sizes), " as ", detail::describe(*spec.layout, sizes), ", found ",
                local.sizes(), ": with uneven shards pass the global sizes");
}

/// A handle of `local`, checked, with its gradient promised in the layout `gradient`.
/// What placements say is replicated is the caller's word, which debug mode compares. Collective
/// then.
DistributedTensor with_equal_copies(const DistributedTensor& made) {
  const DeviceMesh& mesh = made.mesh();
  for (int dim = 0; detail::checks_calls() && dim < mesh.ndim(); ++dim) {
    if (detail::is_replicated_on(*made.layout(), dim)) {
      detail::check_replicas(
          detail::peers_along(mesh, dim), {{"the local tensor", local_tensor(made)}},
          detail::Equality::kRounded, "from_local",
          "give the ranks that replicate it the same values, or another placement");
    }
  }
  return made;
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
  if (!sizes) {
    check_not_distributed(local);
    check_placements(local, mesh, placements);
    sizes = sizes_of_whole(local, mesh, placements);
  }
  return with_equal_copies(detail::make_agreed(mesh, [&] {
    check_placements(local, mesh, placements);
    const auto layout = to_layout(mesh.shape().sizes(), placements, *sizes);
    const auto gradient = grad_placements
                              ? to_layout(mesh.shape().sizes(), *grad_placements, *sizes)
                              : detail::gradient_layout(layout);
    return wrap_local(local, {mesh, layout}, *sizes, gradient);
  }));
}

DistributedTensor DistributedTensor::from_local(const at::Tensor& local, const ShardingSpec& spec,
                                                std::vector<std::int64_t> sizes) {
  return with_equal_copies(detail::make_agreed(spec.mesh, [&] {
    return wrap_local(local, spec, sizes, detail::gradient_layout(spec.layout));
  }));
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
  // Casts before it sends, for the type that is asked for is mostly the narrower one. Autograd
  // undoes the cast.
  const auto source = options.forward_dtype ? tensor_.to(*options.forward_dtype) : tensor_;
  const auto target = to_layout(mesh.shape().sizes(), placements, impl_of(source).spec()->sizes);
  detail::check_partials(*target, source.scalar_type(), "redistribute");
  return DistributedTensor(detail::redistribute_with_gradient(source, {mesh, target}, options));
}

/// Two recorded steps, so that the gradient takes the way back: the local gradient's placements,
/// then a redistribution to this tensor's.
at::Tensor DistributedTensor::full_tensor(std::optional<Placements> grad_placements) const {
  const comm::CallerScope caller("full_tensor");
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

std::ostream& operator<<(std::ostream& stream, const ShardingSpec& spec) {
  return stream << spec.mesh << ", " << spec.layout;
}

bool detail::IsDistributed::operator()(const at::Tensor& tensor) const {
  return tensor.defined() && detail::as_distributed(tensor) != nullptr;
}

const ShardingSpec& sharding_spec(const at::Tensor& tensor) {
  return impl_of(tensor).spec()->sharding;
}

const at::Tensor& local_tensor(const at::Tensor& tensor) {
  const auto* impl = tensor.defined() ? detail::as_distributed(tensor) : nullptr;
  if (impl == nullptr) {
    return tensor;
  }
  detail::check_readable(*impl, "local_tensor()");
  return impl->local();
}

/// Not through make_agreed: layers of the library call it in the middle of a step, with sizes that
/// ranks have agreed on.
at::Tensor make_distributed(const at::Tensor& local, const ShardingSpec& spec,
                            std::vector<std::int64_t> sizes) {
  return wrap_local(local.detach(), spec, sizes, detail::gradient_layout(spec.layout));
}

DistributedTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    const Placements& placements) {
  const DistributedTensor made = detail::make_agreed(mesh, [&] {
    TESSERA_CHECK(!tessera::is_distributed(tensor),
                  "distribute_tensor of a tensor that is distributed "
                  "already: redistribute() changes its placements");
    const auto sizes = tensor.sizes().vec();
    const auto& mesh_sizes = mesh.shape().sizes();
    const auto target = to_layout(mesh_sizes, placements, sizes);
    detail::check_partials(*target, tensor.scalar_type(), "distribute_tensor");
    // As a replicated tensor first: cutting the shard out of it is a local step of a
    // redistribution, and its gradient is a gather.
    const auto replicated = Layout::replicated(mesh_sizes, static_cast<int>(tensor.dim()));
    return wrap_local(tensor, {mesh, replicated}, sizes, replicated).redistribute(target);
  });
  if (detail::checks_calls()) {
    detail::check_replicas(detail::peers_of(mesh), {{"the tensor", tensor.detach()}},
                           detail::Equality::kBitwise, "distribute_tensor",
                           "pass the same values on every rank, or name the source of them");
  }
  return made;
}

DistributedTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    const Placements& placements,
                                    const DistributeOptions& options) {
  if (!options.source) {
    return distribute_tensor(tensor, mesh, placements);
  }
  const auto sizes = tensor.sizes().vec();
  // Checks the arguments, on all ranks before the scatter: ranks that disagree would wait there for
  // one another. What it makes is empty and tells the layout.
  const auto empty = detail::make_agreed(mesh, [&] {
    const ShardingSpec target{mesh, to_layout(mesh.shape().sizes(), placements, sizes)};
    detail::check_partials(*target.layout, tensor.scalar_type(), "distribute_tensor");
    TESSERA_CHECK(*options.source >= 0 && *options.source < mesh.size(), "distribute_tensor from ",
                  *options.source, " of ", to_string(mesh), ": give 0 to ", mesh.size() - 1);
    const auto none = at::empty(detail::local_sizes(target, sizes), tensor.options());
    return wrap_local(none, target, sizes, detail::gradient_layout(target.layout));
  });
  const comm::CallerScope caller("distribute_tensor");
  // Without gradient: only one rank has the tensor that it would belong to.
  const auto part = detail::scatter_from(tensor.detach(), *options.source, empty.spec());
  return DistributedTensor(make_distributed(part, empty.spec(), sizes));
}

}  // namespace tessera
