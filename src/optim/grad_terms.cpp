#include "grad_terms.h"

#include <ATen/ops/_foreach_mul.h>

#include <algorithm>
#include <map>
#include <utility>

#include "flat_runs.h"
#include "slot_gradient.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::optim {
namespace {

bool contains(const DeviceMesh& mesh, int rank) {
  return std::ranges::find(mesh.ranks(), rank) != mesh.ranks().end();
}

bool contains(const DeviceMesh& mesh, const DeviceMesh& part) {
  return mesh == part ||
         std::ranges::all_of(part.ranks(), [&](int rank) { return contains(mesh, rank); });
}

/// Whether this rank counts its part of such a tensor: it is the first along each mesh dimension
/// that replicates. A submesh and its translates hold copies; the one with the root's first rank
/// counts.
bool counts(const ShardingSpec& spec) {
  const std::vector<std::int64_t>& coordinate = spec.mesh.coordinate();
  if (coordinate.empty()) return false;
  for (int d = 0; d < spec.mesh.ndim(); ++d) {
    if (spec.layout->sharded_dim(d) < 0 && coordinate[static_cast<std::size_t>(d)] > 0) {
      return false;
    }
  }
  return contains(spec.mesh, spec.mesh.root().ranks().front());
}

/// The larger of two meshes that are one inside the other.
void widen(DeviceMesh& joint, const DeviceMesh& mesh) {
  if (!joint || (mesh.size() > joint.size() && contains(mesh, joint))) joint = mesh;
  TESSERA_CHECK(contains(joint, mesh), "the norm of gradients on ", to_string(joint), " and on ",
                to_string(mesh), " was asked for, of which neither holds all ranks of the other; ",
                "name a mesh that holds both in NormOptions::over");
}

}  // namespace

GradTerms collect_grads(const std::vector<nn::SlotPtr>& parameters, const DeviceMesh& over) {
  GradTerms terms;
  terms.joint = over;
  // Every rank takes part in the reduction, with or without gradients.
  for (const nn::SlotPtr& slot : parameters) {
    const at::Tensor& parameter = slot->persistent();
    if (!terms.device) terms.device = parameter.device();
    if (tessera::is_distributed(parameter)) {
      widen(terms.joint, sharding_spec(parameter).mesh.root());
    }
  }
  for (const nn::SlotPtr& slot : parameters) {
    const at::Tensor grad = slot_gradient(*slot);
    if (!grad.defined() || local_tensor(grad).numel() == 0) continue;
    terms.locals.push_back(local_tensor(grad));
    if (!tessera::is_distributed(grad)) {
      terms.plain.push_back(grad);
    } else if (counts(sharding_spec(grad))) {
      terms.owned.push_back(local_tensor(grad));
    }
  }
  for (auto* list : {&terms.locals, &terms.plain, &terms.owned}) *list = merge_adjoining(*list);
  return terms;
}

void scale_grads(const GradTerms& terms, const at::Tensor& factor) {
  // A list kernel takes tensors of one type on one device.
  std::map<std::pair<c10::DeviceType, c10::ScalarType>, std::vector<at::Tensor>> lists;
  for (const at::Tensor& grad : terms.locals) {
    lists[{grad.device().type(), grad.scalar_type()}].push_back(grad);
  }
  for (const auto& [kind, grads] : lists) {
    const bool wide = kind.second == c10::ScalarType::Double;
    at::_foreach_mul_(grads, factor.to(grads[0].device(),
                                       wide ? c10::ScalarType::Double : c10::ScalarType::Float));
  }
}

}  // namespace tessera::optim
