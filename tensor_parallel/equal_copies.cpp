// Comparisons between ranks: no rank alone can see that copies differ. A run with different copies
// may have a loss that looks right.

#include "equal_copies.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "plan/checked_plan.h"
#include "plan/plan_text.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/kernels/fake_mode.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/gradients.h"
#include "tessera/nn/detail/origins.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::tensor_parallel {
namespace {

using tessera::detail::call_at_end_of_backward;
using tessera::detail::Equality;
using tessera::detail::Replica;

constexpr const char* kSameValues =
    "give its copies the same values (one seed for all ranks, nn::init_weights, a checkpoint), let "
    "the plan split it, or, where each rank has another (experts), say so with "
    "ParameterSlot::set_distinct_along()";
constexpr const char* kSameOrigin =
    "give all ranks one seed (nn::init_weights, at::manual_seed before the model is made), or load "
    "a checkpoint";
constexpr const char* kSameInput =
    "give every rank of this mesh the same batch (is another dimension of the mesh meant?), or say "
    "what a part is: by DistributedTensor::from_local, or in the plan by prepare_module_input";

/// Parameters below `root` that have slots, each once. named_slots() would throw for the others.
nn::NamedSlots parameters_below(const nn::ModuleBase& root) {
  nn::NamedSlots found;
  nn::visit_modules(root, [&](const std::string& fqn, const nn::ModuleBase& module) {
    for (const auto& [name, slot] : module.slots()) {
      if (std::ranges::find(found, slot, &nn::NamedSlots::value_type::second) == found.end()) {
        found.emplace_back(nn::join_fqn(fqn, name), slot);
      }
    }
  });
  return found;
}

/// Whether `rank` has the same shard as this one. A rank outside of the tensor's mesh is at this
/// rank's place in another slice like it.
bool holds_the_same(const ShardingSpec& spec, int rank) {
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

/// Whether the ranks of `mesh` have copies of it.
bool is_copied(const at::Tensor& tensor, const DeviceMesh& mesh) {
  if (!tessera::is_distributed(tensor)) {
    return true;
  }
  const ShardingSpec& spec = sharding_spec(tensor);
  return std::ranges::all_of(mesh.ranks(), [&](int rank) { return holds_the_same(spec, rank); });
}

/// Undefined also while gradients wait to be reduced, and where each rank of `mesh` has its part:
/// backward may leave a gradient split whose parameter is not.
at::Tensor gradient_of(const at::Tensor& parameter, const DeviceMesh& mesh) {
  const at::Tensor& gradient = parameter.grad();
  const bool compared =
      gradient.defined() && nn::placeholder(gradient) == nullptr && is_copied(gradient, mesh);
  return compared ? gradient : at::Tensor();
}

/// Fake tensors have no values.
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

void name_calls(nn::ModuleBase& module, const std::string& fqn) {
  // An earlier hook may throw before ours has run.
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

EqualCopies::EqualCopies(nn::ModuleBase& root, DeviceMesh mesh)
    : mesh_(std::move(mesh)),
      debug_(tessera::detail::debug_checks()),
      parameters_(parameters_below(root)) {}

bool EqualCopies::add(nn::ModuleBase& module, const std::string& fqn) {
  if (!names_.emplace(&module, fqn).second) {
    return false;
  }
  module.attach(shared_from_this());
  if (debug_) {
    name_calls(module, fqn);
  }
  module.add_forward_pre_hook([copies = shared_from_this()](auto&, nn::TensorList) {
    if (!std::exchange(copies->compared_, true)) {
      copies->compare(copies->copies(false), Equality::kBitwise, kSameValues);
      copies->compare_origins();
    }
  });
  return true;
}

void EqualCopies::watch_root(nn::ModuleBase& root) {
  root.add_forward_pre_hook([copies = shared_from_this()](auto&, nn::TensorList inputs) {
    if (!nn::is_recomputing()) {
      copies->compare_before_forward(inputs);
    }
  });
  if (debug_) {
    root.add_forward_hook([copies = shared_from_this()](auto&, nn::TensorList outputs) {
      copies->compare_after_backward(outputs);
    });
  }
}

std::string EqualCopies::name_of(const nn::ModuleBase& module) const {
  return quoted(names_.at(&module));
}

void EqualCopies::check_input(const nn::ModuleBase& module, const at::Tensor& tensor) const {
  if (debug_ && has_values(tensor)) {
    tessera::detail::check_replicas(
        tessera::detail::peers_of(mesh_), {{"its plain input", tensor.detach()}},
        Equality::kRounded, detail::concat(name_of(module), " on ", to_string(mesh_)), kSameInput);
  }
}

bool EqualCopies::has_copies(const nn::ParameterSlot& slot) const {
  const at::Tensor& tensor = slot.persistent();
  return !tensor.is_meta() && !is_distinct_on(slot, mesh_) && is_copied(tensor, mesh_);
}

std::vector<Replica> EqualCopies::copies(bool gradients) const {
  std::vector<Replica> replicas;
  for (const auto& [name, slot] : parameters_) {
    if (has_copies(*slot)) {
      const at::Tensor& tensor = slot->persistent();
      replicas.push_back(
          {detail::concat(gradients ? "the gradient of parameter '" : "parameter '", name, "'"),
           local_tensor(gradients ? gradient_of(tensor, mesh_) : tensor)});
    }
  }
  return replicas;
}

void EqualCopies::compare_before_forward(nn::TensorList inputs) {
  const bool is_first = !std::exchange(compared_, true);
  const Equality equality = is_first ? Equality::kBitwise : Equality::kRounded;
  std::vector<Replica> replicas;
  if (is_first || debug_) {
    replicas = copies(false);
  }
  std::string remedy = kSameValues;
  // In one exchange with the parameters' comparison.
  if (c10::GradMode::is_enabled() && !std::exchange(compared_inputs_, true)) {
    std::ranges::move(plain_inputs(inputs), std::back_inserter(replicas));
    remedy += detail::concat("; of inputs: ", kSameInput);
  }
  compare(replicas, equality, remedy);
  if (is_first) {
    compare_origins();
  }
}

void EqualCopies::compare_origins() const {
  std::vector<std::pair<std::string, std::int64_t>> origins;
  for (const auto& [name, slot] : parameters_) {
    if (!slot->persistent().is_meta() && !is_distinct_on(*slot, mesh_) && !has_copies(*slot)) {
      origins.emplace_back(detail::concat("parameter '", name, "'"), nn::detail::origin_of(*slot));
    }
  }
  if (mesh_.size() == 1) {
    return;
  }
  const std::string difference = nn::detail::different_origins(mesh_, origins);
  TESSERA_CHECK(difference.empty(), "tensor parallelism on ", to_string(mesh_), ": ", difference,
                "; ", kSameOrigin);
}

void EqualCopies::compare(const std::vector<Replica>& copies, Equality equality,
                          const std::string& remedy) const {
  if (!copies.empty()) {
    tessera::detail::check_replicas(tessera::detail::peers_of(mesh_), copies, equality,
                                    detail::concat("tensor parallelism on ", to_string(mesh_)),
                                    remedy);
  }
}

void EqualCopies::compare_gradients() const {
  compare(
      copies(true), Equality::kRounded,
      "its copies would drift apart: see that each rank computes the same with it, or that what "
      "it is computed with is distributed");
}

/// Runs after other callbacks at the end of this backward: FSDP's reductions, and pending sums.
void EqualCopies::compare_after_backward(nn::TensorList outputs) {
  for (const at::Tensor* output : outputs) {
    if (!output->defined() || !output->requires_grad()) {
      continue;
    }
    tessera::detail::add_own_hook(
        *output, tessera::detail::OwnHook::kNotice,
        [copies = shared_from_this()](const at::Tensor& gradient) {
          const int backward = tessera::detail::backward_id();
          if (std::exchange(copies->backward_, backward) != backward) {
            call_at_end_of_backward(
                [copies] { call_at_end_of_backward([copies] { copies->compare_gradients(); }); });
          }
          return gradient;
        });
  }
}

}  // namespace tessera::tensor_parallel
