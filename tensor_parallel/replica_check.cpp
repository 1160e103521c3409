// Compares data that tensor parallelism requires to be equal on several ranks. A rank alone cannot
// notice a difference, and the loss can still look right.

#include "internal.h"
#include "tessera/kernels/detail/fake_state.h"
#include "tessera/nn/detail/records.h"
#include "tessera/nn/module.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>

#include "tessera/core/detail/environment.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/kernels/fake_mode.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/copy_check.h"
#include "tessera/nn/detail/slots.h"

namespace tessera::tensor_parallel {
namespace {

using tessera::detail::call_at_end_of_backward;
using tessera::detail::Equality;
using tessera::detail::Replica;

constexpr const char* kSameValues =
    "give all ranks the same values (one seed, nn::init_weights, a checkpoint), split the "
    "parameter in the plan, or call ParameterSlot::set_distinct_along() if the ranks have "
    "different values (experts)";
constexpr const char* kSameOrigin =
    "give all ranks one seed (nn::init_weights, or at::manual_seed before the model is made), or "
    "load a checkpoint";
constexpr const char* kSameInput =
    "give every rank of this mesh the same batch (was another dimension of the mesh meant?), or "
    "pass the part of each rank by DistributedTensor::from_local or prepare_module_input";

/// Returns the parameters of `root` and its submodules, each once. named_slots() cannot be used,
/// because it throws for a parameter without an nn::ParameterSlot.
nn::NamedSlots parameters_below(const nn::ModuleBase& root) {
  nn::NamedSlots found;
  nn::visit_modules(root, [&](const std::string& fqn, const nn::ModuleBase& module) {
    for (const auto& [name, slot] : module.slots()) {
      if (std::ranges::find(found, slot, &nn::NamedSlots::value_type::second) == found.end()) {
        found.emplace_back(nn::detail::join_fqn(fqn, name), slot);
      }
    }
  });
  return found;
}

/// Whether `rank` has the same shard as this rank. A rank outside of the tensor's mesh is assumed
/// to have this rank's coordinate in another submesh.
bool has_same_shard(const ShardingSpec& spec, int rank) {
  const std::vector<int>& ranks = spec.mesh.ranks();
  std::int64_t index = std::ranges::find(ranks, rank) - ranks.begin();
  if (index == std::ssize(ranks)) {
    return true;
  }
  for (int dim = spec.mesh.ndim() - 1; dim >= 0; --dim) {
    const std::int64_t coordinate = index % spec.mesh.size(dim);
    if (coordinate != spec.mesh.local_rank(dim) &&
        !tessera::detail::is_replicated_on(*spec.layout, dim)) {
      return false;
    }
    index /= spec.mesh.size(dim);
  }
  return true;
}

/// Whether the tensor is replicated over the ranks of `mesh`. The tensor can still be sharded over
/// other mesh dimensions, such as FSDP's.
bool is_replicated_over(const DeviceMesh& mesh, const at::Tensor& tensor) {
  if (!tessera::is_distributed(tensor)) {
    return true;
  }
  const ShardingSpec& spec = sharding_spec(tensor);
  return std::ranges::all_of(mesh.ranks(), [&](int rank) { return has_same_shard(spec, rank); });
}

/// Returns a parameter's gradient; undefined if FSDP has not reduced the gradient yet.
at::Tensor gradient_of(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  return gradient.defined() && nn::placeholder(gradient) == nullptr ? gradient : at::Tensor();
}

bool has_values(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_meta() && !kernels::in_fake_mode();
}

std::vector<Replica> plain_inputs(nn::TensorList inputs) {
  std::vector<Replica> replicas;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (has_values(*inputs[i]) && !tessera::is_distributed(*inputs[i])) {
      replicas.push_back({detail::concat("the plain input ", i), inputs[i]->detach()});
    }
  }
  return replicas;
}

/// Adds the module's name to error messages of operators in the module's forward.
void name_calls(nn::ModuleBase& module, const std::string& fqn) {
  // The number of running calls of the module. The number is 0 in the always-hook if an earlier
  // pre-hook threw.
  const auto begun = std::make_shared<int>(0);
  module.add_forward_pre_hook([fqn, begun](auto&, nn::TensorList) {
    ++*begun;
    tessera::detail::push_module_name(fqn);
  });
  module.add_always_hook([begun] {
    if (*begun > 0) {
      --*begun;
      tessera::detail::pop_module_name();
    }
  });
}

}  // namespace

ReplicaCheck::ReplicaCheck(nn::ModuleBase& root, DeviceMesh mesh)
    : mesh_(std::move(mesh)),
      debug_(tessera::detail::debug_checks()),
      parameters_(parameters_below(root)) {}

bool ReplicaCheck::add(nn::ModuleBase& module, const std::string& fqn) {
  if (!names_.emplace(&module, fqn).second) {
    return false;
  }
  module.attach(shared_from_this());
  if (debug_) {
    name_calls(module, fqn);
  }
  module.add_forward_pre_hook([self = shared_from_this()](auto&, nn::TensorList) {
    if (!self->compared_) {
      self->compare_before_forward({});
    }
  });
  return true;
}

void ReplicaCheck::watch_root(nn::ModuleBase& root) {
  root.add_forward_pre_hook([self = shared_from_this()](auto&, nn::TensorList inputs) {
    if (!nn::is_recomputing()) {
      self->compare_before_forward(inputs);
    }
  });
  if (debug_) {
    root.add_forward_hook([self = shared_from_this()](auto&, nn::TensorList outputs) {
      self->compare_after_backward(outputs);
    });
  }
}

std::string ReplicaCheck::name_of(const nn::ModuleBase& module) const {
  return quoted(names_.at(&module));
}

void ReplicaCheck::check_input(const nn::ModuleBase& module, const at::Tensor& tensor) const {
  if (debug_ && has_values(tensor)) {
    tessera::detail::check_replicas(
        tessera::detail::peers_of(mesh_), {{"the plain input", tensor.detach()}},
        Equality::kRounded, detail::concat(name_of(module), " on ", to_string(mesh_)), kSameInput);
  }
}

bool ReplicaCheck::is_replicated(const nn::ParameterSlot& slot) const {
  const at::Tensor& tensor = slot.persistent();
  return !tensor.is_meta() && !is_distinct_on(slot, mesh_) && is_replicated_over(mesh_, tensor);
}

std::vector<Replica> ReplicaCheck::replicas(bool gradients) const {
  std::vector<Replica> replicas;
  for (const auto& [name, slot] : parameters_) {
    if (is_replicated(*slot)) {
      const at::Tensor& tensor = slot->persistent();
      replicas.push_back(
          {detail::concat(gradients ? "the gradient of parameter '" : "parameter '", name, "'"),
           local_tensor(gradients ? gradient_of(tensor) : tensor)});
    }
  }
  return replicas;
}

void ReplicaCheck::compare_before_forward(nn::TensorList inputs) {
  const bool is_first = !std::exchange(compared_, true);
  std::vector<Replica> found = is_first || debug_ ? replicas(false) : std::vector<Replica>();
  std::string remedy = kSameValues;
  if (!inputs.empty() && c10::GradMode::is_enabled() && !std::exchange(compared_inputs_, true)) {
    std::ranges::move(plain_inputs(inputs), std::back_inserter(found));
    remedy += detail::concat("; for inputs: ", kSameInput);
  }
  compare(found, is_first ? Equality::kBitwise : Equality::kRounded, remedy);
  if (is_first) {
    compare_origins();
  }
}

void ReplicaCheck::compare_origins() const {
  if (mesh_.size() == 1) {
    return;
  }
  std::vector<std::pair<std::string, std::int64_t>> origins;
  for (const auto& [name, slot] : parameters_) {
    if (!slot->persistent().is_meta() && !is_distinct_on(*slot, mesh_) && !is_replicated(*slot)) {
      origins.emplace_back(detail::concat("parameter '", name, "'"), nn::detail::origin_of(*slot));
    }
  }
  const std::string difference = nn::detail::different_origins(mesh_, origins);
  TESSERA_CHECK(difference.empty(), "tensor parallelism on ", to_string(mesh_), ": ", difference,
                "; ", kSameOrigin);
}

void ReplicaCheck::compare(const std::vector<Replica>& replicas, Equality equality,
                           const std::string& remedy) const {
  if (!replicas.empty()) {
    tessera::detail::check_replicas(tessera::detail::peers_of(mesh_), replicas, equality,
                                    detail::concat("tensor parallelism on ", to_string(mesh_)),
                                    remedy);
  }
}

void ReplicaCheck::compare_after_backward(nn::TensorList outputs) {
  // Ids of the running backwards that will compare gradients at their end, so that each backward
  // compares once. A backward can reach several outputs, and backwards can be nested.
  const auto queued = std::make_shared<std::unordered_set<int>>();
  for (const at::Tensor* output : outputs) {
    if (!output->defined() || !output->requires_grad()) {
      continue;
    }
    tessera::detail::add_own_hook(
        *output, tessera::detail::OwnHook::kNotice,
        [self = shared_from_this(), queued](const at::Tensor& gradient) {
          if (queued->insert(tessera::detail::backward_id()).second) {
            // The comparison must run after FSDP's end-of-backward callback, which may be queued
            // later. So this callback queues the comparison as a second callback.
            call_at_end_of_backward([self] {
              call_at_end_of_backward([self] {
                self->compare(
                    self->replicas(true), Equality::kRounded,
                    "compute equal results with the parameter on every rank, or distribute the "
                    "tensors that are combined with it; otherwise the replicas diverge");
              });
            });
          }
          return gradient;
        });
  }
}

}  // namespace tessera::tensor_parallel
