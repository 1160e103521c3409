#include <ATen/core/Formatting.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <functional>
#include <ostream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <variant>

#include "autograd/autograd.h"
#include "rank/rank.h"
#include "redistribute/redistribute.h"
#include "tensor/distributed_impl.h"
#include "tensor/tensor_spec.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/agreement.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/local_map.h"
#include "tessera/dtensor/random.h"

namespace tessera {

// DistributedTensor and its free functions check arguments, convert placements to layouts, and call
// autograd.cpp. With TESSERA_DEBUG=1, make_agreed throws on all ranks if the ranks disagree.

namespace {

std::string text_of(const DistributedTensor& tensor) {
  return detail::describe(*detail::impl_of_distributed(tensor).spec()) + " of " +
         c10::toString(tensor.tensor().scalar_type());
}

/// Compares `number`, a hash, between ranks. Returns the ranks whose hash differs from that of the
/// mesh's first rank, as text ("1, 3"); empty if all hashes are equal. Collective.
std::string ranks_that_differ(const DeviceMesh& mesh, std::uint64_t number) {
  const comm::CallerScope caller("check_agreement");
  const detail::BelowAutograd guard;
  std::vector<int> others =
      comm::ranks_that_differ(flush_pending_transfers(mesh.group_of_all_ranks()), mesh.device(),
                              std::bit_cast<std::int64_t>(number));
  for (int& rank : others) {
    rank = mesh.ranks()[static_cast<std::size_t>(rank)];
  }
  return fmt::format("{}", fmt::join(others, ", "));
}

void compare(const DeviceMesh& mesh, const std::string& text) {
  const auto others = ranks_that_differ(mesh, stream_of(text.c_str()));
  TESSERA_CHECK(others.empty(), "the ranks of ", to_string(mesh), " disagree on a tensor: rank ",
                mesh.world()->rank(), " has ", text, "; the tensor differs from rank ",
                mesh.ranks()[0], " on ranks ", others,
                "; pass the same sizes, type and placements on every rank");
}

/// Returns the result of `make`, which must not communicate. If checks_agreement(), the ranks
/// compare their results, and all ranks throw if `make` throws on one rank.
DistributedTensor make_agreed(const DeviceMesh& mesh,
                              const std::function<DistributedTensor()>& make) {
  if (!detail::checks_agreement()) {
    return make();
  }
  DistributedTensor made;
  std::exception_ptr error;
  try {
    made = make();
  } catch (...) {
    error = std::current_exception();
  }
  try {
    compare(mesh, error ? "nothing: it failed" : text_of(made));
  } catch (...) {
    if (!error) {
      throw;
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
  return made;
}

void check_placements(const at::Tensor& local, const DeviceMesh& mesh,
                      const Placements& placements) {
  detail::check_plain(local);
  TESSERA_CHECK(placements.size() == static_cast<std::size_t>(mesh.ndim()),
                "from_local: ", placements.size(), " placements were passed for ", to_string(mesh),
                "; pass one placement per mesh dimension");
  for (const Placement& placement : placements) {
    const auto* shard = std::get_if<Shard>(&placement);
    TESSERA_CHECK(shard == nullptr || (shard->dim >= -local.dim() && shard->dim < local.dim()),
                  "from_local: ", to_string(placement), " was passed for a local tensor of ",
                  local.dim(), " dimensions; shard a dimension that the tensor has");
  }
}

std::vector<std::int64_t> sizes_of_whole(const at::Tensor& local, const DeviceMesh& mesh,
                                         const Placements& placements) {
  const auto strided = [](const Placement& placement) {
    return std::holds_alternative<StridedShard>(placement);
  };
  TESSERA_CHECK(std::ranges::none_of(placements, strided),
                "from_local with a strided shard needs the global sizes: pass `sizes`");
  return detail::agreed_sizes("from_local", local, mesh, placements);
}

/// Returns the layout that `placements` describe for the local gradient of a tensor. Throws Error,
/// on all ranks, unless `placements` shard the tensor as `layout` does.
LayoutPtr local_gradient(const char* asked, const std::optional<Placements>& placements,
                         const Layout& layout, c10::IntArrayRef sizes) {
  if (!placements) {
    return detail::gradient_layout(layout.ptr());
  }
  const LayoutPtr gradient = to_layout(layout.mesh_sizes(), *placements, sizes);
  TESSERA_CHECK(gradient->dims() == layout.dims(), asked,
                ": the local gradient of a tensor of sizes ", sizes, " placed as ",
                detail::describe(layout, sizes), " cannot be placed as ", to_string(*placements),
                "; pass placements that split the gradient as the tensor is split");
  return gradient;
}

void check_whole(const at::Tensor& tensor) {
  TESSERA_CHECK(tensor.defined(),
                "distribute_tensor: the tensor is undefined; pass the whole tensor on every rank");
  TESSERA_CHECK(!tessera::is_distributed(tensor),
                "distribute_tensor: the tensor is distributed already; change the placements with "
                "redistribute()");
}

/// Returns the distributed tensor `made`. With TESSERA_DEBUG=1 first compares replicated local
/// tensors between ranks, which is collective.
DistributedTensor with_equal_copies(const DistributedTensor& made) {
  const DeviceMesh& mesh = made.mesh();
  for (int dim = 0; detail::checks_calls() && dim < mesh.ndim(); ++dim) {
    if (detail::is_replicated_on(*made.layout(), dim)) {
      detail::check_replicas(
          detail::peers_along(mesh, dim), {{"the local tensor", local_tensor(made)}},
          detail::Equality::kRounded, "from_local",
          "pass the same values on the ranks that replicate the tensor, or pass another placement");
    }
  }
  return made;
}

DistributedTensor made_of(const at::Tensor& local, const ShardingSpec& spec,
                          const std::vector<std::int64_t>& sizes, LayoutPtr gradient) {
  detail::check_local(local, spec, sizes);
  return DistributedTensor(detail::from_local_with_gradient(local, spec, sizes, gradient));
}

}  // namespace

void check_agreement(const DistributedTensor& tensor) {
  compare(tensor.mesh(), text_of(tensor));
}

DistributedTensor::DistributedTensor(at::Tensor tensor) : tensor_(std::move(tensor)) {
  detail::impl_of_distributed(tensor_);
}

DistributedTensor DistributedTensor::from_local(const at::Tensor& local, const DeviceMesh& mesh,
                                                const Placements& placements,
                                                std::optional<std::vector<std::int64_t>> sizes,
                                                std::optional<Placements> grad_placements) {
  if (!sizes) {
    check_placements(local, mesh, placements);
    sizes = sizes_of_whole(local, mesh, placements);
  }
  return with_equal_copies(make_agreed(mesh, [&] {
    check_placements(local, mesh, placements);
    const auto layout = to_layout(mesh.shape().sizes(), placements, *sizes);
    const auto gradient = local_gradient("from_local", grad_placements, *layout, *sizes);
    return made_of(local, {mesh, layout}, *sizes, gradient);
  }));
}

DistributedTensor DistributedTensor::from_local(const at::Tensor& local, const ShardingSpec& spec,
                                                std::vector<std::int64_t> sizes) {
  return with_equal_copies(make_agreed(spec.mesh, [&] {
    TESSERA_CHECK(spec.layout, "from_local: the spec has no layout; make one with to_layout()");
    return made_of(local, spec, sizes, detail::gradient_layout(spec.layout));
  }));
}

at::Tensor DistributedTensor::to_local(std::optional<Placements> grad_placements) const {
  const auto& spec = detail::impl_of_distributed(tensor_).spec();
  return detail::to_local_with_gradient(
      tensor_, local_gradient("to_local", grad_placements, *spec->sharding.layout, spec->sizes));
}

DistributedTensor DistributedTensor::redistribute(LayoutPtr layout) const {
  TESSERA_CHECK(layout, "redistribute: the layout is null; pass a result of to_layout()");
  detail::check_partials(*layout, tensor_.scalar_type(), "redistribute");
  return DistributedTensor(detail::redistribute_with_gradient(tensor_, {mesh(), layout}));
}

DistributedTensor DistributedTensor::redistribute(const Placements& placements,
                                                  const RedistributeOptions& options) const {
  const auto target = to_layout(mesh().shape().sizes(), placements,
                                detail::impl_of_distributed(tensor_).spec()->sizes);
  detail::check_partials(*target, tensor_.scalar_type(), "redistribute");
  return DistributedTensor(detail::redistribute_with_gradient(tensor_, {mesh(), target}, options));
}

/// The backward of to_local() gives the local gradient the layout `gradient`; the backward of
/// redistribute() then redistributes this gradient to the tensor's own layout.
at::Tensor DistributedTensor::full_tensor(std::optional<Placements> grad_placements) const {
  const comm::CallerScope caller("full_tensor");
  const auto own = layout();
  const auto whole = Layout::replicated(own->mesh_sizes(), own->tensor_ndim());
  const auto gradient = local_gradient("full_tensor", grad_placements, *whole, tensor_.sizes());
  return detail::to_local_with_gradient(redistribute(whole).tensor(), gradient);
}

Placements DistributedTensor::placements() const {
  const auto& spec = *detail::impl_of_distributed(tensor_).spec();
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

namespace {

DistributedTensor distribute_equal(const at::Tensor& tensor, const DeviceMesh& mesh,
                                   const Placements& placements) {
  DistributedTensor made = make_agreed(mesh, [&] {
    check_whole(tensor);
    const auto sizes = tensor.sizes().vec();
    const auto& mesh_sizes = mesh.shape().sizes();
    const auto target = to_layout(mesh_sizes, placements, sizes);
    detail::check_partials(*target, tensor.scalar_type(), "distribute_tensor");
    // Redistributing a replicated tensor needs no communication: each rank selects its shard. The
    // backward gathers the gradient.
    const auto replicated = Layout::replicated(mesh_sizes, static_cast<int>(tensor.dim()));
    return made_of(tensor, {mesh, replicated}, sizes, replicated).redistribute(target);
  });
  if (detail::checks_calls()) {
    detail::check_replicas(detail::peers_of(mesh), {{"the tensor", tensor.detach()}},
                           detail::Equality::kBitwise, "distribute_tensor",
                           "pass the same values on every rank, or pass a source rank");
  }
  return made;
}

}  // namespace

DistributedTensor distribute_tensor(const at::Tensor& tensor, const DeviceMesh& mesh,
                                    const Placements& placements, std::optional<int> source) {
  if (!source) {
    return distribute_equal(tensor, mesh, placements);
  }
  const auto sizes = tensor.sizes().vec();
  // The ranks compare the arguments before the scatter, because ranks with different arguments
  // would wait for each other forever. Only the layout and sizes of `empty` are used.
  const auto empty = make_agreed(mesh, [&] {
    check_whole(tensor);
    const ShardingSpec target{mesh, to_layout(mesh.shape().sizes(), placements, sizes)};
    detail::check_partials(*target.layout, tensor.scalar_type(), "distribute_tensor");
    TESSERA_CHECK(*source >= 0 && *source < mesh.size(), "distribute_tensor: source is ", *source,
                  ", outside ", to_string(mesh), "; pass 0 to ", mesh.size() - 1);
    const auto none = at::empty(detail::local_sizes(target, sizes), tensor.options());
    return made_of(none, target, sizes, detail::gradient_layout(target.layout));
  });
  const comm::CallerScope caller("distribute_tensor");
  // The scatter has no gradient, because only one rank has the source tensor.
  const auto part = detail::scatter_from(tensor.detach(), *source, empty.spec());
  return DistributedTensor(make_distributed(part, empty.spec(), sizes));
}

/// Prevents the installation of the hook that redistributes a leaf's gradient to the leaf's layout.
/// Returns false if the hook is already installed or prevented.
bool leave_gradient_pending(const at::Tensor& leaf) {
  detail::DistributedTensorImpl* impl = detail::as_distributed(leaf);
  TESSERA_CHECK(impl != nullptr, "leave_gradient_pending: pass a distributed tensor");
  if (impl->has_gradient_hook()) {
    return false;
  }
  impl->set_gradient_hook();
  return true;
}

// Factory functions for distributed tensors. Each rank computes its shard from global indices, so
// nothing is sent, and every mesh gets the same tensor.

namespace {

at::TensorOptions on_mesh(at::TensorOptions options, const DeviceMesh& mesh) {
  return options.has_device() ? options : options.device(mesh.device());
}

/// Makes a distributed tensor without Partial, fills the tensor by `fill`, and converts the tensor
/// to Partial if requested. Sets `requires_grad` last, so that the result is a leaf.
DistributedTensor make(const std::vector<std::int64_t>& sizes, const DeviceMesh& mesh,
                       const Placements& placements, const at::TensorOptions& options,
                       const std::function<void(const at::Tensor&)>& fill) {
  TESSERA_CHECK(std::ranges::all_of(sizes, [](std::int64_t size) { return size >= 0; }),
                "a distributed tensor cannot have the sizes ", c10::IntArrayRef(sizes),
                "; pass sizes of at least 0");
  const auto target = to_layout(mesh.shape().sizes(), placements, sizes);
  const ShardingSpec without_partials{mesh, detail::gradient_layout(target)};
  const auto local = at::empty(detail::local_sizes(without_partials, sizes),
                               on_mesh(options, mesh).requires_grad(std::nullopt));
  detail::check_partials(*target, local.scalar_type(), "a factory");
  const auto made = make_distributed(local, without_partials, sizes);
  if (!local.is_meta()) {
    fill(made);
  }
  auto result = DistributedTensor(made).redistribute(target);
  if (options.requires_grad()) {
    result.tensor().requires_grad_();
  }
  return result;
}

}  // namespace

DistributedTensor empty(std::vector<std::int64_t> sizes, const DeviceMesh& mesh,
                        const Placements& placements, at::TensorOptions options) {
  return make(sizes, mesh, placements, options, [](const at::Tensor&) {});
}

DistributedTensor full(std::vector<std::int64_t> sizes, const at::Scalar& value,
                       const DeviceMesh& mesh, const Placements& placements,
                       at::TensorOptions options) {
  return make(sizes, mesh, placements, options,
              [&](const at::Tensor& t) { local_tensor(t).fill_(value); });
}

DistributedTensor zeros(std::vector<std::int64_t> sizes, const DeviceMesh& mesh,
                        const Placements& placements, at::TensorOptions options) {
  return full(std::move(sizes), 0, mesh, placements, options);
}

DistributedTensor ones(std::vector<std::int64_t> sizes, const DeviceMesh& mesh,
                       const Placements& placements, at::TensorOptions options) {
  return full(std::move(sizes), 1, mesh, placements, options);
}

DistributedTensor rand(std::vector<std::int64_t> sizes, RandomKey key, const DeviceMesh& mesh,
                       const Placements& placements, at::TensorOptions options) {
  return make(sizes, mesh, placements, options,
              [&](const at::Tensor& t) { uniform_(t, 0, 1, key); });
}

DistributedTensor randn(std::vector<std::int64_t> sizes, RandomKey key, const DeviceMesh& mesh,
                        const Placements& placements, at::TensorOptions options) {
  return make(sizes, mesh, placements, options,
              [&](const at::Tensor& t) { normal_(t, 0, 1, key); });
}

// to_string() prints this rank's values of a distributed tensor and their global indices.
// libtorch's printer reads memory, and a distributed tensor has no memory of its own.

namespace {

constexpr std::int64_t kMostElements = 1000;

std::string places(const DistributedTensor& tensor) {
  std::vector<std::string> blocks;
  const auto sizes = tensor.tensor().sizes();
  for (const auto& box : owned_boxes(*tensor.layout(), sizes, tensor.mesh().coordinate())) {
    std::vector<std::string> ranges;
    for (std::size_t dim = 0; dim < box.sizes.size(); ++dim) {
      const auto begin = box.global_offset[dim];
      ranges.push_back(fmt::format("{}:{}", begin, begin + box.sizes[dim]));
    }
    blocks.push_back(fmt::format("[{}]", fmt::join(ranges, ", ")));
  }
  return blocks.empty() ? "nothing" : fmt::format("{}", fmt::join(blocks, " and "));
}

/// Formats the values of a local tensor by libtorch's printer. Runs below autograd, because the
/// printer calls operators that autograd must not record.
std::string values(const at::Tensor& local) {
  if (local.is_meta()) {
    return "(no values on the meta device)";
  }
  if (local.numel() > kMostElements) {
    return fmt::format("({} elements)", local.numel());
  }
  const detail::BelowAutograd guard;
  std::ostringstream text;
  text << local;
  return text.str();
}

std::string text_of(const DistributedTensor& tensor, const DistributedTensor& shown,
                    const char* holds) {
  const auto& value = tensor.tensor();
  const auto& mesh = tensor.mesh();
  return fmt::format("DistributedTensor([{}], {}, {}, {}), rank {} {} {}:\n{}",
                     fmt::join(value.sizes(), ", "), c10::toString(value.scalar_type()),
                     to_string(mesh), detail::describe(*tensor.layout(), value.sizes()),
                     mesh.world()->rank(), holds, places(shown), values(local_tensor(shown)));
}

}  // namespace

std::string to_string(const DistributedTensor& tensor) {
  if (!tensor.tensor().defined()) {
    return "DistributedTensor()";
  }
  if (!tensor.layout()->is_partial()) {
    return text_of(tensor, tensor, "holds");
  }
  // A Partial tensor is reduced before printing, because its terms are not values of the tensor.
  const at::NoGradGuard no_grad;
  const auto reduced = tensor.redistribute(detail::gradient_layout(tensor.layout()));
  return text_of(tensor, reduced, "holds, reduced,");
}

std::ostream& operator<<(std::ostream& stream, const DistributedTensor& tensor) {
  return stream << to_string(tensor);
}

// local_map: runs a function of local tensors on distributed tensors. local_map is composed of
// redistribute, to_local and from_local, which handle the gradients; autograd does not see
// local_map itself.

namespace {

using OptionalPlacements = std::vector<std::optional<Placements>>;

std::vector<std::string> texts_of(const std::vector<Placements>& lists) {
  std::vector<std::string> texts;
  for (const Placements& list : lists) {
    texts.push_back(to_string(list));
  }
  return texts;
}

void check_list(const char* name, std::size_t items, std::size_t wanted, const char* of) {
  TESSERA_CHECK(items == 0 || items == wanted, "local_map: ", name, " has ", items, " items for ",
                wanted, " ", of, "; pass ", wanted, " items, or an empty list");
}

void check_lists(bool has_function, std::size_t arguments, std::size_t results,
                 const LocalMapOptions& options) {
  TESSERA_CHECK(has_function, "local_map: the function is empty; pass a function of local tensors");
  check_list("in_placements", options.in_placements.size(), arguments, "arguments");
  check_list("in_grad_placements", options.in_grad_placements.size(), arguments, "arguments");
  check_list("out_sizes", options.out_sizes.size(), results, "lists of out_placements");
}

std::optional<Placements> item(const OptionalPlacements& list, std::size_t number) {
  return number < list.size() ? list[number] : std::nullopt;
}

/// Returns the reduction that a replicated argument's gradient needs over a mesh dimension, because
/// a result has `placement` there. nullopt if each rank has the whole gradient.
std::optional<ReduceOp> reduction_behind(const Placement& placement) {
  if (is_replicate(placement)) {
    return std::nullopt;
  }
  const auto* partial = std::get_if<Partial>(&placement);
  return partial != nullptr ? partial->op : ReduceOp::kSum;
}

/// Returns the default layout of a local_map argument's gradient: the argument's layout without
/// Partial. Adds Partial on mesh dimensions where the argument is replicated and a result is not.
LayoutPtr gradient_behind(const Layout& argument, std::size_t number,
                          const std::vector<Placements>& results) {
  std::vector<PartialDim> partial;
  for (int dim = 0; dim < argument.mesh_ndim(); ++dim) {
    if (!detail::is_replicated_on(argument, dim)) {
      continue;
    }
    std::set<std::optional<ReduceOp>> found;
    for (const Placements& result : results) {
      if (result.size() == argument.mesh_sizes().size()) {
        found.insert(reduction_behind(result[static_cast<std::size_t>(dim)]));
      }
    }
    const std::optional<ReduceOp> op = found.empty() ? std::nullopt : *found.begin();
    const bool known = !op || *op == ReduceOp::kSum || *op == ReduceOp::kAvg;
    TESSERA_CHECK(found.size() <= 1 && known, "local_map: the results are placed as ",
                  fmt::format("{}", fmt::join(texts_of(results), ", ")),
                  ", so the gradient of argument ", number,
                  ", which is replicated, may be equal on all ranks or a sum; pass Replicate "
                  "(equal) or Partial (a sum) in in_grad_placements");
    if (op) {
      partial.push_back({dim, *op});
    }
  }
  return Layout::intern(argument.mesh_sizes(), argument.dims(), partial);
}

at::Tensor to_local(const DistributedTensor& tensor, std::size_t number,
                    const std::vector<Placements>& results, const LocalMapOptions& options) {
  const auto gradient = item(options.in_grad_placements, number);
  const bool recorded = c10::GradMode::is_enabled() && tensor.tensor().requires_grad();
  if (gradient || !recorded) {
    return tensor.to_local(gradient);
  }
  return detail::to_local_with_gradient(tensor, gradient_behind(*tensor.layout(), number, results));
}

/// Converts a local_map argument to a distributed tensor; a plain argument counts as replicated.
DistributedTensor as_distributed(const at::Tensor& argument, const DeviceMesh& mesh) {
  if (tessera::is_distributed(argument)) {
    return DistributedTensor(argument);
  }
  const Placements whole(static_cast<std::size_t>(mesh.ndim()), Replicate{});
  return DistributedTensor::from_local(argument, mesh, whole);
}

at::Tensor local_argument(const at::Tensor& argument, const DeviceMesh& mesh, std::size_t number,
                          const std::vector<Placements>& results, const LocalMapOptions& options) {
  const bool recorded = c10::GradMode::is_enabled() && argument.requires_grad();
  if (!tessera::is_distributed(argument) && !recorded) {
    return argument;
  }
  const DistributedTensor tensor = as_distributed(argument, mesh);
  if (const auto wanted = item(options.in_placements, number)) {
    TESSERA_CHECK(tensor.placements() == *wanted, "local_map: argument ", number,
                  " must have placements ", to_string(*wanted), ", found ",
                  to_string(tensor.placements()), "; redistribute the argument");
  }
  return to_local(tensor, number, results, options);
}

}  // namespace

std::vector<at::Tensor> local_map(
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& function,
    const std::vector<at::Tensor>& arguments, const DeviceMesh& mesh,
    const std::vector<Placements>& out_placements, const LocalMapOptions& options) {
  check_lists(function != nullptr, arguments.size(), out_placements.size(), options);
  const detail::LocalPartsScope local_parts;
  std::vector<at::Tensor> locals;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    locals.push_back(local_argument(arguments[i], mesh, i, out_placements, options));
  }
  auto results = function(locals);
  TESSERA_CHECK(results.size() == out_placements.size(), "local_map: the function returned ",
                results.size(), " tensors for ", out_placements.size(),
                " lists of placements; pass one list of placements per result");
  for (std::size_t i = 0; i < results.size(); ++i) {
    TESSERA_CHECK(results[i].defined(), "local_map: result ", i,
                  " of the function is undefined; return the local tensor of this rank, with 0 "
                  "rows if the shard of this rank is empty");
    std::optional<std::vector<std::int64_t>> sizes;
    if (i < options.out_sizes.size()) {
      sizes = options.out_sizes[i];
    }
    results[i] = DistributedTensor::from_local(results[i], mesh, out_placements[i], sizes);
  }
  return results;
}

}  // namespace tessera
