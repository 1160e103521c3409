// Implements ParameterSlot: a parameter whose tensor can be replaced, for example by a shard.
// libtorch's Module stores tensors by name, so a replacement updates the tables of all modules with
// the slot.

#include "tessera/nn/parameter.h"
#include "tessera/comm/detail/agreement.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/nn/module.h"

#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/core/detail/environment.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/nn/detail/copy_check.h"
#include "tessera/nn/detail/slots.h"

namespace tessera::nn {

using tessera::detail::writes_of;

namespace {

std::atomic<std::uint64_t> unfilled_slots = 1;

}  // namespace

std::uint64_t detail::written_version(const at::Tensor& tensor) {
  return std::uint64_t{writes_of(tensor)} + writes_of(local_tensor(tensor));
}

std::uint64_t detail::fill_epoch() {
  return unfilled_slots.load(std::memory_order_relaxed);
}

detail::SlotState::SlotState(at::Tensor tensor, bool initialized) : tensor_(std::move(tensor)) {
  set_initialized(initialized);
}

bool detail::SlotState::initialized() const {
  return initialized_ || writes_of(stored()) != unfilled_version_;
}

void detail::SlotState::set_initialized(bool initialized) {
  initialized_ = initialized;
  unfilled_version_ = writes_of(stored());
  if (!initialized) {
    unfilled_slots.fetch_add(1, std::memory_order_relaxed);
  }
}

void detail::SlotState::set_fqn(const std::string& fqn) {
  if (fqn.size() <= fqn_.size()) {
    return;
  }
  fqn_ = fqn;
  tessera::detail::name_parameter(tensor_, fqn_);
  tessera::detail::name_parameter(persistent_, fqn_);
}

void ParameterSlot::set(at::Tensor tensor) {
  show(std::move(tensor));
  set_initialized(!tensor_.is_meta());
}

void detail::SlotState::swap(at::Tensor tensor) {
  const bool filled = initialized();
  show(std::move(tensor));
  if (!filled) {
    unfilled_version_ = writes_of(stored());
  }
  initialized_ = filled;
}

void detail::SlotState::set_persistent(at::Tensor tensor) {
  const bool filled = initialized();
  persistent_ = std::move(tensor);
  set_initialized(filled);
  tessera::detail::name_parameter(persistent_, fqn_);
}

void detail::SlotState::show(at::Tensor tensor) {
  tensor_ = std::move(tensor);
  tessera::detail::name_parameter(tensor_, fqn_);
  for (const Owner& owner : owners_) {
    // libtorch's parameter table must list the tensor that forward uses.
    owner.module->swap_parameter(owner.name, tensor_);
  }
}

void detail::SlotState::add_owner(ModuleBase* module, std::string name) {
  owners_.push_back({module, std::move(name)});
}

void detail::SlotState::remove_owner(const ModuleBase* module, const std::string& name) {
  std::erase_if(owners_,
                [&](const Owner& owner) { return owner.module == module && owner.name == name; });
}

const at::Tensor& Parameter::get() const {
  // Returned by a Parameter that has no ParameterSlot, such as an absent bias.
  static const at::Tensor kUndefined;
  return slot_ == nullptr ? kUndefined : (*slot_)->get();
}

std::vector<NamedRows> rows_of_parts(const std::string& fqn, const StoredParts& stored) {
  std::size_t leaf = fqn.rfind('.');
  for (int i = 1; i < stored.depth && leaf != std::string::npos && leaf > 0; ++i) {
    leaf = fqn.rfind('.', leaf - 1);
  }
  const bool is_below = leaf != std::string::npos && leaf > 0;
  const std::size_t parent = is_below ? fqn.rfind('.', leaf - 1) : std::string::npos;
  const std::string above = parent == std::string::npos ? "" : fqn.substr(0, parent + 1);
  const std::string below = leaf == std::string::npos ? "." + fqn : fqn.substr(leaf);
  std::int64_t group_rows = 0;
  for (const StoredParts::Part& part : stored.parts) {
    group_rows += part.rows;
  }
  std::vector<NamedRows> parts;
  std::int64_t first = 0;
  for (const StoredParts::Part& part : stored.parts) {
    parts.push_back(
        {above + part.module + below,
         {.first = first, .run = part.rows, .group_rows = group_rows, .groups = stored.groups}});
    first += part.rows;
  }
  return parts;
}

std::string describe(const ParameterSlot& slot) {
  return slot.fqn().empty()
             ? tessera::detail::concat("a parameter of sizes ", slot.persistent().sizes())
             : "parameter '" + slot.fqn() + "'";
}

void drop_gradient(const ParameterSlot& slot) {
  // With FSDP the shard and the unsharded parameter can both have a gradient.
  slot.persistent().mutable_grad().reset();
  slot.get().mutable_grad().reset();
}

bool brought_nonfinite(const ParameterSlot& slot) {
  return std::ranges::any_of(slot.owners(), [&](const ParameterSlot::Owner& owner) {
    const auto record = owner.module->attached<GradientRecord>();
    return record != nullptr && record->brought_nonfinite(slot);
  });
}

std::int64_t detail::origin_of_seed(std::uint64_t seed) {
  return static_cast<std::int64_t>(substream(seed, 1) | 1);
}

std::int64_t detail::origin_of_values(at::Tensor whole) {
  constexpr std::int64_t kPositions = 16;
  for (std::int64_t dim = 0; dim < whole.dim(); ++dim) {
    const std::int64_t step = std::max<std::int64_t>(whole.size(dim) / kPositions, 1);
    whole = whole.slice(dim, 0, std::nullopt, step);
  }
  const std::int64_t hash = tessera::detail::hash_of_values(whole);
  return hash != 0 ? hash : 1;
}

void detail::note_origin(const ParameterSlot& slot, std::int64_t number) {
  const at::Tensor& tensor = slot.persistent();
  for (const ParameterSlot::Owner& owner : slot.owners()) {
    auto origins = owner.module->attached<Origins>();
    if (origins == nullptr) {
      origins = std::make_shared<Origins>();
      owner.module->attach(origins);
    }
    origins->of[&slot] = {number, tessera::detail::identity_of(tensor), written_version(tensor)};
  }
}

std::int64_t detail::origin_of(const ParameterSlot& slot) {
  const at::Tensor& tensor = slot.persistent();
  if (slot.owners().empty() || local_tensor(tensor).numel() == 0) {
    return 0;
  }
  const auto origins = slot.owners().front().module->attached<Origins>();
  if (origins == nullptr) {
    return 0;
  }
  const auto found = origins->of.find(&slot);
  const bool valid = found != origins->of.end() &&
                     found->second.tensor == tessera::detail::identity_of(tensor) &&
                     found->second.version == written_version(tensor);
  return valid ? found->second.number : 0;
}

namespace {

using NamedOrigins = std::vector<std::pair<std::string, std::int64_t>>;

std::string range_of(const NamedOrigins& origins) {
  return origins.empty() ? ""
                         : tessera::detail::concat(" (on this rank from ", origins.front().first,
                                                   " to ", origins.back().first, ")");
}

std::vector<std::int64_t> digest_of(const std::vector<std::int64_t>& origins) {
  std::uint64_t digest = 0;
  for (const std::int64_t origin : origins) {
    digest = substream(digest, static_cast<std::uint64_t>(origin));
  }
  return {std::ssize(origins), static_cast<std::int64_t>(digest)};
}

}  // namespace

std::string detail::different_origins(const DeviceMesh& mesh, const NamedOrigins& origins) {
  std::vector<std::int64_t> own;
  std::ranges::transform(origins, std::back_inserter(own),
                         [](const auto& each) { return each.second; });
  comm::Communicator& group = mesh.group_of_all_ranks();
  const auto digests = comm::gather_on_hosts(group, digest_of(own));
  for (std::size_t rank = 1; rank < digests.size(); ++rank) {
    TESSERA_CHECK(digests[rank][0] == digests[0][0], "the models of the ranks differ: of ",
                  to_string(mesh), ", rank ", mesh.ranks()[rank], " has ", digests[rank][0],
                  " parameters, but rank ", mesh.ranks()[0], " has ", digests[0][0],
                  range_of(origins), "; make the same model on every rank");
  }
  if (std::ranges::all_of(digests, [&](const auto& each) { return each == digests.front(); })) {
    return "";
  }
  const auto all = comm::gather_on_hosts(group, own);
  for (std::size_t i = 0; i < origins.size(); ++i) {
    std::size_t first = all.size();
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank][i] == 0) {
        continue;
      }
      first = std::min(first, rank);
      if (all[rank][i] != all[first][i]) {
        return tessera::detail::concat("the shards of ", origins[i].first, " on rank ",
                                       mesh.ranks()[first], " and rank ", mesh.ranks()[rank],
                                       " are parts of different tensors");
      }
    }
  }
  return "";
}

void set_trainable(ParameterSlot& slot, bool trainable) {
  slot.persistent().requires_grad_(trainable);
  slot.get().requires_grad_(trainable);
}

std::unordered_set<SlotPtr> detail::matched_slots(const ModuleBase& module,
                                                  const std::vector<std::string>& patterns,
                                                  const char* caller) {
  std::vector<bool> used(patterns.size());
  std::unordered_set<SlotPtr> matched;
  // Visits a shared module under each of its FQNs, because a pattern can match any of the FQNs.
  visit_modules(module,
                [&](const std::string& fqn, const ModuleBase& each) {
                  for (const auto& [name, slot] : each.slots()) {
                    for (std::size_t i = 0; i < patterns.size(); ++i) {
                      if (matches_fqn(patterns[i], detail::join_fqn(fqn, name))) {
                        used[i] = true;
                        matched.insert(slot);
                      }
                    }
                  }
                },
                {.every_place = true});
  const NamedSlots slots = module.named_slots();
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    TESSERA_CHECK(used[i], caller, ": the pattern '", patterns[i], "' matches none of the ",
                  slots.size(), " parameters of a ", module.name(), "; FQNs look like '",
                  slots.empty() ? "" : slots.front().first,
                  "', and '**' matches any number of segments");
  }
  return matched;
}

void freeze(ModuleBase& module, const std::vector<std::string>& patterns) {
  for (const SlotPtr& slot : detail::matched_slots(module, patterns, "freeze")) {
    set_trainable(*slot, false);
  }
}

// A PlaceholderGradient has a dispatch key that libtorch reserves for wrappers. No other kernels
// use this key, so the fallback in this file gets every operator on a PlaceholderGradient.

namespace {

void refuse_placeholders(const c10::IValue& value) {
  if (value.isTensor()) {
    if (const PlaceholderGradient* found = placeholder(value.toTensor())) {
      found->refuse();
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      refuse_placeholders(element);
    }
  }
}

void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  if (count > 0 && torch::jit::peek(*stack, 0, count).isTensor()) {
    const at::Tensor first = torch::jit::peek(*stack, 0, count).toTensor();
    PlaceholderGradient* found = placeholder(first);
    if (found != nullptr && found->run(op, *stack)) {
      return;
    }
  }
  for (const c10::IValue& value : *stack) {
    refuse_placeholders(value);
  }
  // Reached only for a program's own tensor class that uses the reserved dispatch key.
  fail(op.schema().name(), " was given a tensor with a dispatch key reserved for libtorch's tests");
}

}  // namespace

bool PlaceholderGradient::run(const c10::OperatorHandle&, torch::jit::Stack&) {
  return false;
}

PlaceholderGradient* placeholder(const at::Tensor& gradient) {
  return tessera::detail::impl_cast<PlaceholderGradient>(gradient);
}

TORCH_LIBRARY_IMPL(_, TESSERA_PLACEHOLDER_KEY, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

// An optimizer that was made before fully_shard or to_empty still has the replaced parameter. The
// parameter's gradient becomes a placeholder: every operator on the placeholder throws Error.

namespace {

class RetiredGradient final : public PlaceholderGradient {
 public:
  RetiredGradient(const at::Tensor& parameter, std::string by)
      : PlaceholderGradient(parameter), by_(std::move(by)) {}

  [[noreturn]] void refuse() const override {
    fail("an optimizer or a backward uses a parameter of sizes ", sizes_default(), " that ", by_,
         " has replaced; make torch::optim optimizers after ", by_,
         ", or use a tessera::optim optimizer, which follows the replacement");
  }

 private:
  std::string by_;
};

}  // namespace

void retire_parameter(const at::Tensor& replaced, const at::Tensor& replacement,
                      const std::string& by) {
  // A tensor that is not a leaf with requires_grad is in no optimizer.
  if (!replaced.requires_grad() || !replaced.is_leaf()) {
    return;
  }
  if (replacement.requires_grad()) {
    tessera::detail::move_hooks(replaced, replacement);
  }
  replaced.mutable_grad() = tessera::detail::make_placeholder<RetiredGradient>(replaced, by);
}

namespace {

/// Marks a distributed module: distributing the module a second time throws Error.
struct Distributed {
  DeviceMesh mesh;
};

/// Replicates all plain parameters, because operators do not mix plain and distributed tensors.
void replicate_leftovers(const NamedSlots& slots, const DeviceMesh& mesh) {
  const Placements whole(static_cast<std::size_t>(mesh.ndim()), Replicate{});
  for (const auto& [name, slot] : slots) {
    if (!tessera::is_distributed(slot->get())) {
      distribute_parameter(*slot, mesh, whole);
    }
  }
}

/// With TESSERA_DEBUG=1: checks that all ranks pass equal values of the parameter. An uninitialized
/// parameter is not compared.
void compare_values(const ParameterSlot& slot, const at::Tensor& whole, const DeviceMesh& mesh,
                    const std::string& by) {
  if (tessera::detail::debug_checks()) {
    tessera::detail::check_replicas(tessera::detail::peers_of(mesh),
                                    {{"the parameter", slot.initialized() ? whole : at::Tensor()}},
                                    tessera::detail::Equality::kBitwise, by,
                                    "give the parameter the same values on every rank");
  }
}

}  // namespace

void distribute_parameter(ParameterSlot& slot, const DeviceMesh& mesh, const Placements& placements,
                          const std::string& by) {
  TESSERA_CHECK(!slot.has_persistent(), by,
                ": the parameter belongs to an FSDP unit; distribute it before fully_shard");
  const c10::AutoGradMode no_grad(false);
  // A parameter that parallelize_module() replicated, because no entry of the tensor-parallel plan
  // names the parameter, can still get another layout.
  const bool undone = std::exchange(slot.role.replicated_by_default, false);
  TESSERA_CHECK(undone || !tessera::is_distributed(slot.get()), by,
                ": the parameter is already distributed; distribute it once");
  const at::Tensor whole = (undone ? local_tensor(slot.get()) : slot.get()).detach();
  compare_values(slot, whole, mesh, by);
  const auto replicated = Layout::replicated(mesh.shape().sizes(), static_cast<int>(whole.dim()));
  const DistributedTensor split =
      DistributedTensor(make_distributed(whole, {mesh, replicated}, whole.sizes().vec()))
          .redistribute(placements);
  // A slice would keep the memory of the whole parameter allocated, so the shard is copied.
  at::Tensor local = local_tensor(split);
  if (local.numel() < whole.numel()) {
    local = local.clone(at::MemoryFormat::Contiguous);
  }
  at::Tensor parameter = make_distributed(local, split.spec(), whole.sizes().vec());
  if (slot.get().requires_grad()) {
    // An optimizer that still has the unsharded parameter must fail in its next step.
    parameter.requires_grad_();
    retire_parameter(slot.get(), parameter, by);
  }
  const bool is_part = local.numel() < whole.numel() && slot.initialized() && !whole.is_meta();
  slot.swap(std::move(parameter));
  if (is_part) {
    detail::note_origin(slot, detail::origin_of_values(whole));
  }
}

void distribute_module(
    ModuleBase& module, const DeviceMesh& mesh,
    const std::function<void(const std::string&, ModuleBase&, const DeviceMesh&)>& partition,
    const std::function<void(TensorList, const DeviceMesh&)>& input,
    const std::function<void(TensorList, const DeviceMesh&)>& output) {
  const auto before = module.attached<Distributed>();
  TESSERA_CHECK(before == nullptr, "distribute_module: the module was distributed on ",
                to_string(before ? before->mesh : mesh), " already; distribute a module once");
  // Called before any change: named_slots() throws Error if a parameter has no slot.
  const NamedSlots parameters = module.named_slots();
  if (partition) {
    // Visits a shared module under each of its FQNs, because the caller's function can test for any
    // FQN.
    visit_modules(module,
                  [&](const std::string& fqn, ModuleBase& each) { partition(fqn, each, mesh); },
                  {.every_place = true});
  }
  replicate_leftovers(parameters, mesh);
  replicate_leftovers(module.named_buffer_slots(), mesh);
  if (input) {
    module.add_forward_pre_hook(
        [input, mesh](ModuleBase&, TensorList tensors) { input(tensors, mesh); });
  }
  if (output) {
    module.add_forward_hook(
        [output, mesh](ModuleBase&, TensorList tensors) { output(tensors, mesh); });
  }
  module.attach(std::make_shared<Distributed>(Distributed{mesh}));
}

}  // namespace tessera::nn
