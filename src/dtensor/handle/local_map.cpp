// local_map: runs a function of local tensors on distributed tensors. It is composed of
// redistribute, to_local and from_local, which handle the gradients; autograd does not see
// local_map itself.

#include "tessera/dtensor/local_map.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <set>
#include <string>

#include "autograd/autograd.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/detail/replica_agreement.h"

namespace tessera {
namespace {

using OptionalPlacements = std::vector<std::optional<Placements>>;

std::vector<std::string> texts_of(const std::vector<Placements>& lists) {
  std::vector<std::string> texts;
  for (const Placements& list : lists) {
    texts.push_back(to_string(list));
  }
  return texts;
}

/// Throws Error for a list of options that is neither empty nor has one item per tensor.
void check_list(const char* name, std::size_t items, std::size_t wanted, const char* of) {
  TESSERA_CHECK(items == 0 || items == wanted, "local_map: ", name, " has ", items, " items for ",
                wanted, " ", of, "; give one for each, or none");
}

void check_lists(bool has_function, std::size_t arguments, std::size_t results,
                 const LocalMapOptions& options) {
  TESSERA_CHECK(has_function, "local_map was given no function; pass one of local tensors");
  check_list("in_placements", options.in_placements.size(), arguments, "arguments");
  check_list("in_grad_placements", options.in_grad_placements.size(), arguments, "arguments");
  check_list("out_sizes", options.out_sizes.size(), results, "lists of out_placements");
}

std::optional<Placements> item(const OptionalPlacements& list, std::size_t number) {
  return number < list.size() ? list[number] : std::nullopt;
}

/// The reduction of the ranks' gradients of a replicated argument, if the result has `placement` on
/// a mesh dimension. nullopt: no reduction, because each rank has the whole gradient.
std::optional<ReduceOp> reduction_behind(const Placement& placement) {
  if (is_replicate(placement)) {
    return std::nullopt;
  }
  const auto* partial = std::get_if<Partial>(&placement);
  return partial != nullptr ? partial->op : ReduceOp::kSum;
}

/// The default layout of an argument's gradient: the argument's layout, but replicated where the
/// argument is partial, and partial where the argument is replicated and the results are not.
LayoutPtr gradient_behind(const Layout& argument, std::size_t number,
                          const std::vector<Placements>& results) {
  std::vector<PartialDim> partial;
  for (int dim = 0; dim < argument.mesh_ndim(); ++dim) {
    if (!detail::is_replicated_on(argument, dim)) {
      continue;
    }
    std::set<std::optional<ReduceOp>> found;
    for (const Placements& result : results) {
      // from_local refuses a layout of any other length.
      if (result.size() == argument.mesh_sizes().size()) {
        found.insert(reduction_behind(result[static_cast<std::size_t>(dim)]));
      }
    }
    const std::optional<ReduceOp> op = found.empty() ? std::nullopt : *found.begin();
    const bool known = !op || *op == ReduceOp::kSum || *op == ReduceOp::kAvg;
    TESSERA_CHECK(found.size() <= 1 && known, "local_map: the gradient of argument ", number,
                  ", which is replicated, may be the same on all ranks or one term a rank: the ",
                  "results are placed as ", fmt::format("{}", fmt::join(texts_of(results), ", ")),
                  "; say in in_grad_placements which (Replicate or Partial)");
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

/// The argument as a distributed tensor. A plain argument counts as replicated. If it needs a
/// gradient, that gradient may be partial, because each rank may compute only the gradient of its
/// own part of the results.
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
  DistributedTensor tensor = as_distributed(argument, mesh);
  if (const auto wanted = item(options.in_placements, number)) {
    TESSERA_CHECK(options.redistribute_inputs || tensor.placements() == *wanted,
                  "local_map: argument ", number, " must have placements ", to_string(*wanted),
                  ", found ", to_string(tensor.placements()),
                  ": redistribute it, or set redistribute_inputs");
    tensor = tensor.redistribute(*wanted);
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
                " placements: give one list of placements per result");
  for (std::size_t i = 0; i < results.size(); ++i) {
    TESSERA_CHECK(results[i].defined(), "local_map: result ", i,
                  " of the function is undefined; return this rank's part, of 0 rows where it has "
                  "none");
    std::optional<std::vector<std::int64_t>> sizes;
    if (i < options.out_sizes.size()) {
      sizes = options.out_sizes[i];
    }
    results[i] = DistributedTensor::from_local(results[i], mesh, out_placements[i], sizes);
  }
  return results;
}

}  // namespace tessera
