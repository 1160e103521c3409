#include "tessera/optim/clip_grad.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "slot_gradient.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::optim {
namespace {

/// How many ranks of `root` hold each element of a tensor on one of its submeshes.
std::int64_t copies_on(const DeviceMesh& root, const ShardingSpec& spec) {
  std::int64_t parts = 1;
  for (int d = 0; d < spec.mesh.ndim(); ++d) {
    if (spec.layout->sharded_dim(d) >= 0) parts *= spec.mesh.size(d);
  }
  return root.size() / parts;
}

/// The gradients whose parameters lie on meshes of one root, or all plain ones.
struct Family {
  DeviceMesh root;
  /// Local gradients by how many ranks hold each of their elements.
  std::map<std::int64_t, std::vector<at::Tensor>> by_copies;

  /// The sum of squares of all elements here, each rank's copy counted in proportion: fp64, 0-d.
  at::Tensor local_sum(c10::Device device) const {
    at::Tensor sum = at::zeros({}, at::dtype(c10::ScalarType::Double).device(device));
    for (const auto& [copies, grads] : by_copies) {
      const auto norms = at::_foreach_norm(grads, 2, c10::ScalarType::Float);
      sum += at::stack(norms).to(c10::ScalarType::Double).pow(2).sum() / copies;
    }
    return sum;
  }
};

Family& family_of(std::vector<Family>& families, const DeviceMesh& root) {
  const auto found = std::find_if(families.begin(), families.end(),
                                  [&](const Family& family) { return family.root == root; });
  return found != families.end() ? *found : families.emplace_back(Family{root, {}});
}

void all_reduce(const DeviceMesh& root, const at::Tensor& sum) {
  if (!root || root.size() == 1) return;
  std::vector<int> dims(static_cast<std::size_t>(root.ndim()));
  std::iota(dims.begin(), dims.end(), 0);
  root.group(dims).all_reduce(sum, ReduceOp::kSum)->wait();
}

struct Gradients {
  std::vector<at::Tensor> locals;
  std::vector<Family> families;
  std::optional<c10::Device> device;
};

Gradients collect(const std::vector<nn::SlotPtr>& parameters) {
  Gradients found;
  for (const nn::SlotPtr& slot : parameters) {
    const at::Tensor& parameter = slot->persistent();
    if (!found.device) found.device = parameter.device();
    TESSERA_CHECK(parameter.device() == *found.device, "clip_grad_norm_ got parameters on ",
                  *found.device, " and on ", parameter.device(), "; they must be on one device");
    const bool distributed = tessera::is_distributed(parameter);
    const DeviceMesh root = distributed ? sharding_spec(parameter).mesh.root() : DeviceMesh();
    // Every rank takes part in its meshes' reductions, with or without a gradient.
    Family& family = family_of(found.families, root);
    const at::Tensor grad = slot_gradient(*slot);
    if (!grad.defined()) continue;
    const std::int64_t copies = distributed ? copies_on(root, sharding_spec(grad)) : 1;
    family.by_copies[copies].push_back(local_tensor(grad));
    found.locals.push_back(local_tensor(grad));
  }
  return found;
}

}  // namespace

at::Tensor clip_grad_norm_(const std::vector<nn::SlotPtr>& parameters, double max_norm) {
  TESSERA_CHECK(max_norm >= 0.0, "clip_grad_norm_ to a norm of ", max_norm, " was asked for");
  const c10::AutoGradMode no_grad(false);
  const Gradients gradients = collect(parameters);
  const c10::Device device = gradients.device.value_or(c10::kCPU);
  at::Tensor total = at::zeros({}, at::dtype(c10::ScalarType::Double).device(device));
  for (const Family& family : gradients.families) {
    const at::Tensor sum = family.local_sum(device);
    all_reduce(family.root, sum);
    total += sum;
  }
  const at::Tensor norm = total.sqrt().to(c10::ScalarType::Float);
  if (gradients.locals.empty()) return norm;
  at::_foreach_mul_(gradients.locals, (max_norm / (norm + 1e-6)).clamp_max(1.0));
  return norm;
}

}  // namespace tessera::optim
