#include "tessera/dtensor/local_map.h"

#include "tessera/core/error.h"

namespace tessera {
namespace {

using PlacementsOfArguments = std::vector<std::optional<Placements>>;

std::optional<Placements> item(const PlacementsOfArguments& list, std::size_t number) {
  return number < list.size() ? list[number] : std::nullopt;
}

at::Tensor local_argument(const at::Tensor& argument, std::size_t number,
                          const LocalMapOptions& options) {
  if (!tessera::is_distributed(argument)) return argument;
  DistributedTensor tensor(argument);
  if (const auto wanted = item(options.in_placements, number)) {
    TESSERA_CHECK(options.redistribute_inputs || tensor.placements() == *wanted,
                  "local_map: argument ", number, " is to lie as ", to_string(*wanted), ", found ",
                  to_string(tensor.placements()), ": redistribute it, or set redistribute_inputs");
    tensor = tensor.redistribute(*wanted);
  }
  return tensor.to_local(item(options.in_grad_placements, number));
}

}  // namespace

std::vector<at::Tensor> local_map(
    const std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>& function,
    const std::vector<at::Tensor>& arguments, const DeviceMesh& mesh,
    const std::vector<Placements>& out_placements, const LocalMapOptions& options) {
  std::vector<at::Tensor> locals;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    locals.push_back(local_argument(arguments[i], i, options));
  }
  auto results = function(locals);
  TESSERA_CHECK(results.size() == out_placements.size(), "local_map: the function returned ",
                results.size(), " tensors for ", out_placements.size(),
                " placements: give one list of placements per result");
  for (std::size_t i = 0; i < results.size(); ++i) {
    std::optional<std::vector<std::int64_t>> sizes;
    if (i < options.out_sizes.size()) sizes = options.out_sizes[i];
    results[i] = DistributedTensor::from_local(results[i], mesh, out_placements[i], sizes);
  }
  return results;
}

}  // namespace tessera
