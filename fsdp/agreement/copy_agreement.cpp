// Compares the copies of parameters that FSDP's ranks hold, by a hash. A copy that differs would
// train on without an error: gradients are averaged over copies, values are not.

#include "agreement/copy_agreement.h"

#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::fsdp {
namespace {

using tessera::detail::Equality;
using tessera::detail::Replica;

enum class Of : std::uint8_t { kValues, kGradients };

Replica copy_of(const ShardedParameter& parameter, Of of) {
  const std::string name = "parameter '" + parameter.name() + "'";
  if (of == Of::kValues) {
    return {name, parameter.shard()};
  }
  const at::Tensor& gradient = parameter.gradient();
  return {"the gradient of " + name, gradient.defined() ? local_tensor(gradient) : at::Tensor()};
}

/// `all`: of every parameter, else of those that are not split.
std::vector<Replica> copies(const ParameterGroup& group, bool all, Of of) {
  std::vector<Replica> replicas;
  for (const ShardedParameter& parameter : group.parameters()) {
    if (!parameter.sharded().is_meta() && (all || !parameter.shape().dim)) {
      replicas.push_back(copy_of(parameter, of));
    }
  }
  return replicas;
}

void check(const std::vector<ParameterGroup>& groups, Equality equality, Of of,
           const std::string& label) {
  const c10::AutoGradMode no_grad(false);
  const std::string remedy =
      of == Of::kValues
          ? "give all ranks the same values (one seed, nn::init_weights, a checkpoint)"
          : "the copies would drift apart: a gradient was changed on some ranks";
  for (const ParameterGroup& group : groups) {
    const auto compare = [&](const DeviceMesh& mesh, bool all) {
      const std::vector<Replica> replicas = copies(group, all, of);
      if (mesh && mesh.size() > 1 && !replicas.empty()) {
        tessera::detail::check_replicas(tessera::detail::peers_of(mesh), replicas, equality, label,
                                        remedy);
      }
    };
    compare(group.mesh().shard, false);
    compare(group.mesh().replicate, true);
  }
}

}  // namespace

void check_copies(const std::vector<ParameterGroup>& groups, Equality equality,
                  const std::string& label) {
  check(groups, equality, Of::kValues, label);
}

void check_copies_of_gradients(const std::vector<ParameterGroup>& groups,
                               const std::string& label) {
  check(groups, Equality::kRounded, Of::kGradients, label);
}

}  // namespace tessera::fsdp
