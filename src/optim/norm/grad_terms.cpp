// Which rank counts which gradient. Copies exist along mesh dimensions that replicate, and across
// submeshes; each gradient must be counted once, on one rank.
#include "norm/grad_terms.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include "local_shards.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::optim {
namespace {

/// By world ranks, as meshes of different roots are compared.
bool contains(const DeviceMesh& mesh, int rank) {
  return std::ranges::find(mesh.ranks(), rank) != mesh.ranks().end();
}

bool contains(const DeviceMesh& mesh, const DeviceMesh& part) {
  return mesh == part ||
         std::ranges::all_of(part.ranks(), [&](int rank) { return contains(mesh, rank); });
}

bool has_dim(const DeviceMesh& mesh, const std::string& name) {
  return std::ranges::find(mesh.shape().names(), name) != mesh.shape().names().end();
}

/// Decides which rank counts a local gradient in the norm. A parameter on a submesh may have copies
/// on the other slices of the mesh (data parallelism over a TP submesh), which must not be counted
/// again; or the other slices may hold different parameters (experts, pipeline stages), which must.
class Counting {
 public:
  explicit Counting(const NormOptions& options) : options_(options) {}

  /// Throws Error for a dimension in distinct_along that neither `over` nor a root has. A misspelt
  /// name would be ignored: different parameters would count as copies, and the norm would be too
  /// small.
  void check(const std::vector<nn::SlotPtr>& parameters) const {
    std::vector<DeviceMesh> meshes;
    if (options_.over) {
      meshes = {options_.over, options_.over.root()};
    }
    for (const nn::SlotPtr& slot : parameters) {
      if (tessera::is_distributed(slot->persistent())) {
        const DeviceMesh root = sharding_spec(slot->persistent()).mesh.root();
        if (std::ranges::find(meshes, root) == meshes.end()) {
          meshes.push_back(root);
        }
      }
    }
    for (const std::string& name : options_.distinct_along) {
      const bool known =
          std::ranges::any_of(meshes, [&](auto& mesh) { return has_dim(mesh, name); });
      TESSERA_CHECK(meshes.empty() || known, "the norm of gradients that differ along '", name,
                    "' was asked for, but ", to_string(meshes.front()), " has no such dimension",
                    "; name dimensions of the mesh that the parameters' meshes are slices of");
    }
  }

  /// Whether this rank counts its local tensor: if it is the first along each mesh dimension that
  /// replicates, and its submesh is the first of those that hold copies.
  bool counts(const nn::ParameterSlot& slot, const ShardingSpec& spec) {
    const std::vector<std::int64_t>& coordinate = spec.mesh.coordinate();
    // This rank holds nothing of it.
    if (coordinate.empty()) {
      return false;
    }
    for (int d = 0; d < spec.mesh.ndim(); ++d) {
      if (spec.layout->sharded_dim(d) < 0 && coordinate[static_cast<std::size_t>(d)] > 0) {
        return false;
      }
    }
    const DeviceMesh& distinct = slot.distinct_along();
    // A model has hundreds of parameters on two or three meshes.
    const auto [known, is_new] = found_.try_emplace({spec.mesh, distinct}, false);
    if (is_new) {
      known->second = is_first(spec.mesh, distinct);
    }
    return known->second;
  }

 private:
  bool is_first(const DeviceMesh& mesh, const DeviceMesh& distinct) const {
    const DeviceMesh base = base_of(mesh);
    // No coordinate to go by: the mesh that holds the root's first rank counts.
    if (!base.contains_this_rank()) {
      return contains(mesh, mesh.root().ranks().front());
    }
    if (!distinct) {
      return contains(mesh, first_rank(base, {}));
    }
    std::vector<bool> skipped = varied(base, distinct);
    const std::vector<bool> own = varied(base, mesh);
    for (std::size_t d = 0; d < own.size(); ++d) {
      // Along its own dimensions the mesh extends: there the first coordinate is looked for, and
      // not this rank's.
      skipped[d] = skipped[d] && !own[d];
    }
    // The second term is for dimensions of `base` along which `mesh` has some of the coordinates.
    return contains(mesh, first_rank(base, skipped)) || contains(distinct, first_rank(base, {}));
  }

  /// The mesh whose dimensions tell copies from different parameters.
  DeviceMesh base_of(const DeviceMesh& mesh) const {
    const std::vector<std::string>& names = options_.distinct_along;
    const bool over_says =
        options_.over && !names.empty() && std::ranges::all_of(names, [&](const std::string& name) {
          return has_dim(options_.over, name);
        });
    return over_says ? options_.over : mesh.root();
  }

  /// This rank's coordinate in `base`, with 0 along all dimensions but the distinct ones and those
  /// in `skipped`, as a rank.
  /// Row-major, as ranks of a mesh are.
  int first_rank(const DeviceMesh& base, const std::vector<bool>& skipped) const {
    std::size_t index = 0;
    for (int d = 0; d < base.ndim(); ++d) {
      const auto at = static_cast<std::size_t>(d);
      const bool stays = (at < skipped.size() && skipped[at]) ||
                         std::ranges::any_of(options_.distinct_along, [&](const std::string& name) {
                           return has_dim(base, name) && base.shape().dim(name) == d;
                         });
      index = index * static_cast<std::size_t>(base.size(d)) +
              static_cast<std::size_t>(stays ? base.local_rank(d) : 0);
    }
    return base.ranks()[index];
  }

  /// Along which dimensions of `base` the ranks of `mesh` differ.
  /// By coordinates in `base` against this rank's own: where one differs, the mesh extends.
  static std::vector<bool> varied(const DeviceMesh& base, const DeviceMesh& mesh) {
    std::vector<bool> differs(static_cast<std::size_t>(base.ndim()), false);
    for (const int rank : mesh.ranks()) {
      auto index = std::ranges::find(base.ranks(), rank) - base.ranks().begin();
      for (int d = base.ndim(); d-- > 0; index /= base.size(d)) {
        if (index % base.size(d) != base.local_rank(d)) {
          differs[static_cast<std::size_t>(d)] = true;
        }
      }
    }
    return differs;
  }

  struct MeshHash {
    std::size_t operator()(const std::pair<DeviceMesh, DeviceMesh>& pair) const {
      return std::hash<DeviceMesh>()(pair.first) * 31 + std::hash<DeviceMesh>()(pair.second);
    }
  };

  const NormOptions& options_;
  std::unordered_map<std::pair<DeviceMesh, DeviceMesh>, bool, MeshHash> found_;
};

/// The larger of two meshes that are one inside the other.
void widen(DeviceMesh& joint, const DeviceMesh& mesh) {
  if (!joint || (mesh.size() > joint.size() && contains(mesh, joint))) {
    joint = mesh;
  }
  TESSERA_CHECK(contains(joint, mesh), "the norm of gradients on ", to_string(joint), " and on ",
                to_string(mesh), " was asked for, but neither holds all ranks of the other; ",
                "name a mesh that holds both in NormOptions::over");
}

}  // namespace

/// Two passes: the joint mesh must be known to all ranks, with gradients or without; only then are
/// the gradients collected, with pending sums reduced.
GradTerms collect_grads(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options) {
  TESSERA_CHECK(std::ranges::find(parameters, nullptr) == parameters.end(),
                "the norm of gradients was asked for with a null parameter; pass slots of modules, "
                "such as those of slots_of(model)");
  Counting counting(options);
  counting.check(parameters);
  GradTerms terms;
  terms.joint = options.over;
  // Every rank takes part in the reduction, with or without gradients.
  for (const nn::SlotPtr& slot : parameters) {
    const at::Tensor& parameter = slot->persistent();
    if (!terms.device) {
      terms.device = parameter.device();
    }
    if (tessera::is_distributed(parameter)) {
      widen(terms.joint, sharding_spec(parameter).mesh.root());
    }
  }
  for (const nn::SlotPtr& slot : parameters) {
    const at::Tensor grad = slot_gradient(*slot);
    if (!grad.defined() || local_tensor(grad).numel() == 0) {
      continue;
    }
    terms.locals.push_back(local_tensor(grad));
    if (!tessera::is_distributed(grad)) {
      terms.plain.push_back(grad);
    } else {
      auto& list = counting.counts(*slot, sharding_spec(grad)) ? terms.owned : terms.copies;
      list.push_back(local_tensor(grad));
    }
  }
  for (auto* list : {&terms.locals, &terms.plain, &terms.owned, &terms.copies}) {
    // Fewer tensors for the list kernels; elementwise terms do not change.
    *list = merge_adjoining(*list);
  }
  return terms;
}

}  // namespace tessera::optim
