#include "param.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <iterator>

#include "tessera/core/error.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/nn/detail/copy_check.h"
#include "tessera/nn/detail/slots.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

// Returns the sharding spec of a parameter's shard. A plain tensor is sharded on FSDP's mesh, a
// tensor-parallel tensor on the mesh that joins FSDP's mesh and the tensor's mesh.

namespace {

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

/// Whether two slices of one root mesh extend along the same dimension of the root mesh. Names are
/// not compared, because flattened slices have other names.
bool share_ranks(const DeviceMesh& a, const DeviceMesh& b) {
  return std::ranges::count_if(a.ranks(), [&](int rank) {
           return std::ranges::find(b.ranks(), rank) != b.ranks().end();
         }) > 1;
}

/// Returns the submesh of the common root mesh that has the dimensions of both meshes. Dimensions
/// from flatten() or unflatten() come first, then dimensions of the root mesh.
DeviceMesh joined_mesh(const DeviceMesh& outer, const DataMesh& data_mesh,
                       const std::string& name) {
  const DeviceMesh& mesh = data_mesh.all;
  const DeviceMesh root = mesh.root();
  const std::vector<std::string>& own = mesh.shape().names();
  const std::vector<std::string>& others = outer.shape().names();
  const bool disjoint =
      !own.empty() && std::ranges::none_of(own, [&](auto& dim) { return contains(others, dim); });
  TESSERA_CHECK(outer.root() == root && disjoint, data_mesh.caller(), ": ", name,
                " is distributed on ", to_string(outer), ", and the mesh of ", data_mesh.caller(),
                " is ", to_string(mesh),
                "; pass slices of one mesh, for example mesh[\"tp\"] and mesh[\"dp\"]");
  TESSERA_CHECK(!share_ranks(outer, mesh), data_mesh.caller(), ": ", name, " is distributed on ",
                to_string(outer), ", and the mesh of ", data_mesh.caller(), ", ", to_string(mesh),
                ", contains that mesh: a mesh dimension can split a tensor only once; set "
                "Options::parameter_mesh to the other dimensions, or leave the parameter plain");
  const std::vector<std::string>& persistent = data_mesh.persistent().shape().names();
  const std::vector<std::string>& known = root.shape().names();
  std::vector<std::string> names;
  for (const std::vector<std::string>* dims : {&persistent, &others}) {
    std::ranges::copy_if(*dims, std::back_inserter(names),
                         [&](const std::string& dim) { return !contains(known, dim); });
  }
  std::ranges::copy_if(known, std::back_inserter(names), [&](const std::string& dim) {
    return contains(persistent, dim) || contains(others, dim);
  });
  // The root mesh lacks names from unflatten(), so each dimension is looked up in its own mesh.
  std::vector<DeviceMesh> parts;
  for (const std::string& dim : names) {
    parts.push_back((contains(persistent, dim) ? data_mesh.persistent() : outer)[dim]);
  }
  return DeviceMesh::concatenate(parts);
}

/// Converts `layout` from mesh `from` to mesh `to`, which has more dimensions. Dimensions are
/// matched by name.
Layout::Dims renumbered(const Layout& layout, const DeviceMesh& from, const DeviceMesh& to) {
  Layout::Dims dims = layout.dims();
  for (std::vector<Digit>& digits : dims) {
    for (Digit& digit : digits) {
      for (int& mesh_dim : digit.mesh_dims) {
        mesh_dim = to.shape().dim(from.shape().names()[static_cast<std::size_t>(mesh_dim)]);
      }
    }
  }
  return dims;
}

/// A tensor dimension consists of Digits (sub-dimensions), and FSDP splits the last Digit. Returns
/// the last Digit, or nullptr if a mesh dimension splits an earlier Digit. In a fused weight, the
/// first Digit counts the fused blocks.
Digit* digit_to_split(std::vector<Digit>& digits) {
  if (digits.empty()) {
    digits.emplace_back();
  }
  const bool parts = std::all_of(digits.begin(), std::prev(digits.end()),
                                 [](const Digit& digit) { return digit.mesh_dims.empty(); });
  return parts ? &digits.back() : nullptr;
}

}  // namespace

std::int64_t parts_of(const at::Tensor& tensor, std::optional<std::int64_t> dim) {
  std::int64_t parts = 1;
  if (dim && tessera::is_distributed(tensor)) {
    const std::vector<Digit>& digits = sharding_spec(tensor).layout->digits(static_cast<int>(*dim));
    for (std::size_t i = 0; i + 1 < digits.size(); ++i) {
      parts *= digits[i].extent;
    }
  }
  return parts;
}

ShardingSpec sharded_spec(const at::Tensor& tensor, const DataMesh& mesh,
                          std::optional<std::int64_t> dim, const std::string& name) {
  DeviceMesh joined = mesh.persistent();
  Layout::Dims dims(static_cast<std::size_t>(tensor.dim()));
  if (tessera::is_distributed(tensor)) {
    const ShardingSpec& spec = sharding_spec(tensor);
    TESSERA_CHECK(!spec.layout->is_partial(), mesh.caller(), ": ", name,
                  " has a pending reduction, ", to_string(*spec.layout),
                  "; redistribute it to Replicate() or Shard(...) first");
    joined = joined_mesh(spec.mesh, mesh, name);
    dims = renumbered(*spec.layout, spec.mesh, joined);
  }
  if (dim) {
    // FSDP splits each tensor-parallel rank's local shard. In a fused weight (q, k and v in one
    // matrix), FSDP splits each block separately.
    Digit* digit = digit_to_split(dims[static_cast<std::size_t>(*dim)]);
    TESSERA_CHECK(digit != nullptr, "fully_shard: dimension ", *dim, " of ", name, " of sizes ",
                  tensor.sizes(), " is split as ", to_string(*sharding_spec(tensor).layout),
                  ", and cannot be split further; let shard_placement return ",
                  tensor.dim() > 1 ? "Shard of another dimension or Replicate()" : "Replicate()");
    digit->mesh_dims.push_back(
        joined.ndim() == 1 ? 0 : joined.shape().dim(mesh.shard.shape().names().front()));
  }
  return {joined, Layout::intern(joined.shape().sizes(), std::move(dims))};
}

// Under sequence parallelism, the gradients of replicated parameters need a sum over the
// tensor-parallel ranks. All ranks must take part, even ranks without tokens. So the ranks agree on
// the process group of the sum.

UnshardedGradient converted(UnshardedGradient gradient, comm::Communicator* pending,
                            c10::ScalarType dtype) {
  if (gradient.pending == pending) {
    return gradient;
  }
  if (gradient.pending != nullptr) {
    // The user's hooks can reference autograd's tensor, so the gradient is copied.
    gradient.local = gradient.local.to(dtype, /*non_blocking=*/false, /*copy=*/true,
                                       at::MemoryFormat::Contiguous);
    gradient.pending->all_reduce(gradient.local, ReduceOp::kSum)->wait();
  }
  // All ranks of `pending` have the complete gradient, so only rank 0 adds it to the pending sum.
  if (pending != nullptr && pending->rank() != 0) {
    gradient.local.reset();
  }
  gradient.pending = pending;
  return gradient;
}

void add_gradient(UnshardedGradient& sum, const UnshardedGradient& gradient,
                  c10::ScalarType dtype) {
  sum.used |= gradient.used;
  if (!gradient.local.defined()) {
    return;
  }
  if (!sum.local.defined()) {
    // With equal dtypes, `sum` uses the gradient's memory, because `.grad` has released the memory.
    sum = {gradient.local.to(dtype), gradient.pending, sum.used, gradient.divisor};
    return;
  }
  comm::Communicator* pending = sum.pending != nullptr ? sum.pending : gradient.pending;
  sum = converted(std::move(sum), pending, dtype);
  const at::Tensor term = converted(gradient, pending, dtype).local;
  if (!sum.local.defined()) {
    sum.local = term.to(dtype);  // only rank 0 of `pending` has the earlier sum
    sum.divisor = gradient.divisor;
  } else if (term.defined()) {
    sum.local.add_(term, gradient.divisor / sum.divisor);
  }
}

PartialGradGroup::PartialGradGroup(const std::optional<ShardingSpec>& spec) {
  if (!spec) {
    return;
  }
  for (int dim = 0; dim < spec->mesh.ndim(); ++dim) {
    if (spec->layout->sharded_dim(dim) < 0 && spec->mesh.size(dim) > 1) {
      candidates_.push_back(&spec->mesh.group(dim));
    }
  }
  if (!candidates_.empty()) {
    group_ = candidates_.front();
  }
}

void PartialGradGroup::note(const UnshardedGradient& gradient) {
  if (gradient.pending != nullptr) {
    observed_ = gradient.pending;
  }
}

std::vector<std::uint8_t> PartialGradGroup::flags() const {
  std::vector<std::uint8_t> flags;
  for (const comm::Communicator* group : candidates_) {
    flags.push_back(group == observed_ ? 1 : 0);
  }
  return flags;
}

void PartialGradGroup::agree(std::span<const std::uint8_t> flags) {
  // If a gradient must be summed over another process group, converted() computes this sum later.
  const auto found = std::ranges::find(flags, 1);
  group_ =
      found == flags.end() ? nullptr : candidates_[static_cast<std::size_t>(found - flags.begin())];
  candidates_.clear();
}

// Unreduced gradients are stored in the placeholder tensor that the program sees as `.grad`. So a
// program that drops `.grad` also drops the unreduced gradients.

UnreducedGradient::UnreducedGradient(const at::Tensor& parameter, at::Tensor earlier,
                                     std::string name)
    : PlaceholderGradient(parameter), reduced(std::move(earlier)), name_(std::move(name)) {}

void UnreducedGradient::refuse() const {
  fail("the gradient of ", name_,
       " is not reduced over the ranks yet and cannot be read: the last backward ran under "
       "set_requires_gradient_sync(false), set_requires_all_reduce(false) or "
       "set_is_last_backward(false); run a backward with all three true first, or drop the "
       "gradient with zero_grad");
}

bool UnreducedGradient::run(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const std::string& name = op.schema().name();
  if (name == "aten::detach" || name == "aten::detach_") {
    return true;  // detach() of a placeholder returns the same placeholder
  }
  if (name == "aten::zero_") {
    drop();
    return true;
  }
  if (op.operator_name() == c10::OperatorName("aten::add_", "Tensor")) {
    const at::Scalar factor = torch::jit::pop(stack).toScalar();
    const at::Tensor term = torch::jit::pop(stack).toTensor().mul(factor);
    reduced = reduced.defined() ? reduced.add(term) : term;
    return true;
  }
  return false;
}

void UnreducedGradient::drop() {
  unsharded.reset();
  scattered = {};
  expects = false;
  reduced.reset();
}

void UnreducedGradient::release_resources() {
  drop();
  PlaceholderGradient::release_resources();
}

UnreducedGradient* unreduced(const at::Tensor& gradient) {
  return tessera::detail::impl_cast<UnreducedGradient>(gradient);
}

// The shard replaces the original tensor in the module; forward and backward use the unsharded
// tensor. The following functions are not collective.

namespace {

/// Returns the shard of `rank` on `device`; a copy if `shape` splits `local` over several ranks.
at::Tensor cut(const at::Tensor& local, const ShardShape& shape, std::int64_t rank,
               c10::Device device) {
  if (shape.ranks == 1 || !shape.dim) {
    return local.contiguous().to(local.is_meta() ? local.device() : device);
  }
  // A view would keep the memory of the whole parameter alive, so even a contiguous slice is
  // cloned.
  const at::Tensor rows = shape.rows_of(local, rank);
  const at::Tensor own = local.is_meta() || local.device() == device
                             ? rows.clone(at::MemoryFormat::Contiguous)
                             : rows.contiguous().to(device);
  return own.view(shape.shard_sizes(rank));
}

std::optional<ShardingSpec> spec_of(const at::Tensor& tensor) {
  return tessera::is_distributed(tensor) ? std::optional(sharding_spec(tensor)) : std::nullopt;
}

/// Returns the origin (ShardedParameter::origin) of a parameter that FSDP has not split yet. A
/// tensor-parallel shard has the origin of the whole tensor. 0: unknown.
std::int64_t origin_before_cut(const nn::ParameterSlot& slot) {
  const at::Tensor& tensor = slot.get();
  if (!slot.initialized() || tensor.is_meta()) {
    return 0;
  }
  return local_tensor(tensor).sizes() == tensor.sizes()
             ? nn::detail::origin_of_values(local_tensor(tensor).detach())
             : nn::detail::origin_of(slot);
}

}  // namespace

ShardedParameter::ShardedParameter(const ParameterSpec& spec)
    : slot_(spec.slot),
      name_(spec.name),
      shape_{local_tensor(slot_->get()).sizes().vec(), spec.dim, spec.mesh.shard.size(),
             spec.parts},
      home_(spec.home),
      sharding_(spec.sharding),
      unsharded_spec_(spec_of(slot_->get())),
      partial_group_(unsharded_spec_),
      comes_complete_(partial_group_.group() == nullptr) {
  const c10::AutoGradMode no_grad(false);
  const at::Tensor& original = slot_->get();
  const at::Tensor shard =
      cut(local_tensor(original).detach(), shape_, spec.mesh.shard.local_rank(), home_.device);
  sharded_ = make_distributed(shard, spec.sharding, original.sizes().vec());
  sharded_.requires_grad_(original.requires_grad());
  const std::int64_t origin = shape_.dim && shape_.ranks > 1 ? origin_before_cut(*slot_) : 0;
  // From now on, any use of the original tensor throws Error, because the model no longer reads
  // this tensor.
  nn::retire_parameter(original, sharded_, "fully_shard or replicate");
  slot_->set_persistent(sharded_);
  if (origin != 0) {
    nn::detail::note_origin(*slot_, origin);
  }
  install_sharded();
}

std::uint64_t ShardedParameter::version() const {
  return nn::detail::written_version(sharded_);
}

std::int64_t ShardedParameter::origin() const {
  return shape_.dim ? nn::detail::origin_of(*slot_) : 0;
}

bool ShardedParameter::is_replaced() const {
  const at::Tensor& current = slot_->get();
  return !current.is_same(sharded_) && !current.is_same(unsharded_);
}

bool ShardedParameter::adopt() {
  const bool replaced = is_replaced();
  const at::Tensor& current = replaced ? slot_->get() : sharded_;
  TESSERA_CHECK(tessera::is_distributed(current) && current.sizes() == sharded_.sizes() &&
                    sharding_spec(current) == sharding_,
                "parameter '", name_,
                "' was replaced by a tensor that is not laid out like its shard, ",
                to_string(*sharding_.layout), " on ", to_string(sharding_.mesh),
                "; copy values into slot->persistent() instead of replacing it");
  if (!replaced) {
    return false;
  }
  sharded_ = current;
  slot_->set_persistent(sharded_);
  return true;
}

void ShardedParameter::set_stand_in(MakeStandIn make) {
  make_stand_in_ = std::move(make);
}

/// Makes the autograd node that replaces the shard's gradient accumulator. libtorch has only a weak
/// pointer to the node, so stand_in_ owns the node.
void ShardedParameter::install_stand_in() {
  if (make_stand_in_ && (sharded_.is_floating_point() || sharded_.is_complex())) {
    stand_in_ = make_stand_in_(sharded_);
    detail::set_leaf_node(sharded_, stand_in_);
  }
}

void ShardedParameter::set_unsharded(const at::Tensor& local) {
  const c10::AutoGradMode no_grad(false);
  // A parameter that was plain before fully_shard is plain in forward, because users' operators may
  // not accept distributed tensors.
  if (!unsharded_spec_) {
    unsharded_ = local;
  } else {
    unsharded_ = make_distributed(local, *unsharded_spec_, sharded_.sizes().vec());
    // DeferredSums later computes the pending sums of tensor parallelism for all parameters
    // together.
    leave_gradient_pending(unsharded_);
  }
  counted_version_ = version();
  install_stand_in();
}

void ShardedParameter::count_writes() {
  const std::uint64_t now = version();
  // On one rank the unsharded tensor can be a view of the shard; the two then share a version
  // counter.
  if (std::exchange(counted_version_, now) != now &&
      !local_tensor(unsharded_).is_alias_of(shard())) {
    const std::uint64_t before = nn::detail::written_version(unsharded_);
    detail::count_write(unsharded_);
    used_version_ += nn::detail::written_version(unsharded_) - before;
  }
}

void ShardedParameter::begin_use() {
  used_version_ = nn::detail::written_version(unsharded_);
}

bool ShardedParameter::written_in_use() const {
  return nn::detail::written_version(unsharded_) != used_version_;
}

void ShardedParameter::install_unsharded() {
  unsharded_.requires_grad_(trainable());
  using tessera::detail::OwnHook;
  if (notice_ && trainable() && !tessera::detail::has_own_hook(unsharded_, OwnHook::kNotice)) {
    tessera::detail::add_own_hook(unsharded_, OwnHook::kNotice,
                                  [notice = notice_](const at::Tensor& gradient) {
                                    notice();
                                    return gradient;
                                  });
  }
  slot_->swap(unsharded_);
}

UnreducedGradient& ShardedParameter::unreduced_gradient() {
  at::Tensor& gradient = sharded_.mutable_grad();
  if (unreduced(gradient) == nullptr) {
    gradient = detail::make_placeholder<UnreducedGradient>(sharded_, gradient, describe(*slot_));
  }
  return *unreduced(gradient);
}

/// If no unreduced gradient is left, `.grad` becomes the reduced gradient.
void ShardedParameter::settle_unreduced() {
  at::Tensor& gradient = sharded_.mutable_grad();
  const UnreducedGradient* waiting = unreduced(gradient);
  if (waiting != nullptr && waiting->is_settled()) {
    gradient = at::Tensor(waiting->reduced);
  }
}

void ShardedParameter::expect() {
  notice_drop();
  ++expected_;
}

void ShardedParameter::mark_expected() {
  notice_drop();
  if (expected_ > discarded_ || (awaited_ && gradient().defined())) {
    unreduced_gradient().expects = true;
    marked_expected_ = &unreduced_gradient();
  }
}

/// Checks whether the program has dropped the gradient since the last check.
void ShardedParameter::notice_drop() {
  const UnreducedGradient* waiting = unreduced(sharded_.grad());
  const bool expects = waiting != nullptr && waiting->expects;
  if (marked_expected_ != nullptr && !(expects && waiting == marked_expected_)) {
    marked_expected_ = nullptr;
    discarded_ = expected_;
    arriving_.clear();
  }
  TESSERA_CHECK(marked_expected_ != nullptr || !expects, "the gradient of ", describe(*slot_),
                " was removed before its reduction ended and set again; remove gradients only "
                "after a backward with set_is_last_backward(true)");
}

/// Called when the oldest reduction in progress has ended. Returns false if the program has dropped
/// the gradient in the meantime; the caller then discards the result.
bool ShardedParameter::arrives() {
  notice_drop();
  --expected_;
  if (discarded_ == 0) {
    return true;
  }
  --discarded_;
  return false;
}

void ShardedParameter::skip_unused() {
  if (arrives()) {
    settle_expected();
  }
}

void ShardedParameter::settle_expected() {
  if (marked_expected_ != nullptr && expected_ == 0 && !awaited_) {
    marked_expected_ = nullptr;
    unreduced(sharded_.grad())->expects = false;
    settle_unreduced();
  }
}

namespace {

/// Makes a distributed tensor from a plain gradient of a distributed parameter. Every rank has the
/// complete plain gradient. Arises if forward copied a distributed result into a plain tensor, for
/// example.
at::Tensor as_replicated(const at::Tensor& whole, const ShardingSpec& of) {
  return make_distributed(
      whole, {of.mesh, Layout::replicated(of.layout->mesh_sizes(), static_cast<int>(whole.dim()))},
      whole.sizes().vec());
}

/// Removes the gradient from `unsharded` and returns the gradient, in the parameter layout or as a
/// pending sum over one process group. Computes other pending sums, in dtype `dtype`.
UnshardedGradient take_gradient(const at::Tensor& unsharded, c10::ScalarType dtype) {
  // The gradient must leave `.grad`; otherwise the next backward would count the gradient twice.
  at::Tensor gradient = std::exchange(unsharded.mutable_grad(), at::Tensor());
  if (!gradient.defined() || !tessera::is_distributed(unsharded)) {
    return {gradient, nullptr, gradient.defined()};
  }
  const ShardingSpec& to = sharding_spec(unsharded);
  if (!tessera::is_distributed(gradient)) {
    gradient = as_replicated(gradient, to);
  }
  if (sharding_spec(gradient).layout == to.layout) {
    return {local_tensor(gradient), nullptr, true};
  }
  // The sum is computed later, because a shard is smaller and many parameters can then share one
  // all-reduce.
  if (comm::Communicator* group = detail::pending_sum_group(gradient, unsharded)) {
    return {local_tensor(gradient), group, true};
  }
  return {local_tensor(DistributedTensor(gradient.to(dtype)).redistribute(to.layout)), nullptr,
          true};
}

bool is_plain_gradient(const at::Tensor& unsharded) {
  return unsharded.grad().defined() && tessera::is_distributed(unsharded) &&
         !tessera::is_distributed(unsharded.grad());
}

}  // namespace

at::Tensor& ShardedParameter::gradient_place() {
  UnreducedGradient* waiting = unreduced(sharded_.grad());
  return waiting != nullptr ? waiting->reduced : sharded_.mutable_grad();
}

const at::Tensor& ShardedParameter::gradient() const {
  const UnreducedGradient* waiting = unreduced(sharded_.grad());
  return waiting != nullptr ? waiting->reduced : sharded_.grad();
}

void ShardedParameter::add_unreduced(const UnshardedGradient& gradient, c10::ScalarType dtype) {
  UnreducedGradient& waiting = unreduced_gradient();
  if (!waiting.unsharded) {
    waiting.unsharded.emplace();
  }
  add_gradient(*waiting.unsharded, gradient, dtype);
}

bool ShardedParameter::has_unreduced() const {
  const UnreducedGradient* waiting = unreduced(sharded_.grad());
  return waiting != nullptr && waiting->unsharded;
}

UnshardedGradient ShardedParameter::take_unreduced() {
  UnshardedGradient sum = *std::exchange(unreduced_gradient().unsharded, std::nullopt);
  settle_unreduced();
  return sum;
}

/// Puts the accumulated gradient into `.grad` of the unsharded parameter, so that autograd adds to
/// this gradient. Skipped if the next gradient can be a pending sum, which autograd would compute
/// at once.
void ShardedParameter::restore_accumulated_grads() {
  if (!has_unreduced() || request_ != Request::kNone || !comes_complete_ ||
      unsharded_.grad().defined()) {
    return;
  }
  const at::Tensor& kept = unreduced(sharded_.grad())->unsharded->local;
  if (kept.defined()) {
    unsharded_.mutable_grad() =
        unsharded_spec_ ? make_distributed(kept, *unsharded_spec_, sharded_.sizes().vec()) : kept;
    restored_from_ = sharded_.grad();
  }
}

UnshardedGradient ShardedParameter::take_unsharded(c10::ScalarType dtype) {
  // Autograd cannot add a plain gradient to a distributed gradient.
  comes_complete_ = comes_complete_ && !is_plain_gradient(unsharded_);
  UnshardedGradient gradient = take_gradient(unsharded_, dtype);
  if (const at::Tensor restored_from = std::exchange(restored_from_, {}); restored_from.defined()) {
    TESSERA_CHECK(restored_from.is_same(sharded_.grad()) && has_unreduced(), "the gradient of ",
                  describe(*slot_),
                  " was dropped (by zero_grad for example) during the backward that adds to the "
                  "gradient; drop the gradient before or after backward");
    if (gradient.local.defined()) {
      unreduced(restored_from)->unsharded->local.reset();
    }
  }
  return gradient;
}

void ShardedParameter::drop_unsharded() {
  restored_from_.reset();
  if (unsharded_.defined()) {
    unsharded_.mutable_grad().reset();
  }
}

void ShardedParameter::leave_to_replicas(const UnshardedGradient& gradient, c10::ScalarType dtype) {
  if (arrives()) {
    add_gradient(unreduced_gradient().scattered, gradient, dtype);
    settle_expected();
  }
}

bool ShardedParameter::has_left_to_replicas() const {
  const UnreducedGradient* waiting = unreduced(sharded_.grad());
  return waiting != nullptr && waiting->scattered.local.defined();
}

UnshardedGradient ShardedParameter::take_left_to_replicas() {
  if (!has_left_to_replicas()) {
    return {};
  }
  UnshardedGradient sum = std::exchange(unreduced_gradient().scattered, {});
  settle_unreduced();
  return sum;
}

void ShardedParameter::accumulate(const at::Tensor& gradient, bool used) {
  if (!arrives()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  settle_unreduced();
  at::Tensor& sum = gradient_place();
  if (!sum.defined()) {
    accumulation_ = Accumulation::kStarted;
    used_ = false;
    // `.grad` existed before this addition. So settle_use() keeps the gradient even if no rank has
    // used the parameter since.
  } else if (accumulation_ == Accumulation::kSettled) {
    accumulation_ = Accumulation::kAdded;
  }
  used_ |= used;
  const at::Tensor term = detail::has_hooks(sharded_) ? call_hooks(gradient) : gradient;
  if (!sum.defined()) {
    // If the program has dropped the gradient, `arriving_` has only terms of the dropped gradient.
    arriving_.clear();
    sum = distributed(at_home(term));
  } else if (home_.offloaded) {
    arriving_.push_back(at_home(term));
  } else {
    check_layout("the gradient", sum);
    local_tensor(sum).add_(term);
  }
  awaited_ = home_.offloaded;
  if (!awaited_) {
    settle_expected();
    call_hook();
  }
}

void ShardedParameter::arrive() {
  if (!std::exchange(awaited_, false)) {
    return;
  }
  notice_drop();
  settle_expected();
  const auto arrived = std::exchange(arriving_, {});
  // The program can have dropped the gradient during the copy to CPU memory.
  if (!gradient().defined()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  for (const at::Tensor& term : arrived) {
    local_tensor(gradient()).add_(term);
  }
  call_hook();
}

void ShardedParameter::forget_arrivals() {
  arriving_.clear();
  awaited_ = false;
  expected_ = discarded_ = 0;
  if (UnreducedGradient* waiting = unreduced(sharded_.grad())) {
    waiting->expects = false;
    settle_unreduced();
  }
  marked_expected_ = nullptr;
}

at::Tensor ShardedParameter::distributed(const at::Tensor& shard) const {
  return make_distributed(shard, sharding_, sharded_.sizes().vec());
}

bool ShardedParameter::has_hooks() const {
  return detail::has_hooks(sharded_);
}

/// Calls the shard's hooks and returns the gradient that the hooks return. Autograd does not call
/// these hooks, because autograd only knows the unsharded tensor.
at::Tensor ShardedParameter::call_hooks(const at::Tensor& gradient) const {
  at::Tensor shard = at_home(gradient);
  if (home_.pinned) {
    shard = shard.copy_(gradient);  // a blocking copy, since hooks read `shard` on the CPU
  }
  const at::Tensor given = detail::call_hooks(sharded_, distributed(shard));
  check_layout("the result of a gradient hook", given);
  return local_tensor(given);
}

void ShardedParameter::check_layout(const char* what, const at::Tensor& tensor) const {
  const bool distributed = tessera::is_distributed(tensor);
  TESSERA_CHECK(
      distributed && tensor.sizes() == sharded_.sizes() && sharding_spec(tensor) == sharding_, what,
      " of ", describe(*slot_), " is ",
      distributed ? detail::concat("laid out as ", to_string(*sharding_spec(tensor).layout),
                                   ", of sizes ", tensor.sizes())
                  : std::string("a plain tensor"),
      ", but the parameter is distributed as ", to_string(*sharding_.layout), " on ",
      to_string(sharding_.mesh), "; redistribute the tensor, or copy values into the gradient");
}

/// Calls the post-accumulate-grad hook of the shard. An optimizer can step in this hook.
void ShardedParameter::call_hook() {
  if (unreduced(sharded_.grad()) == nullptr && request_ != Request::kReturn) {
    detail::call_hook_after_grad(sharded_);
  }
}

at::Tensor ShardedParameter::at_home(const at::Tensor& gradient) const {
  at::Tensor own = gradient;
  if (home_.pinned) {
    // The copy into pinned memory is asynchronous; CommContext::settle waits for the copy.
    own = at::empty(gradient.sizes(), shard().options().pinned_memory(true));
    own.copy_(gradient, /*non_blocking=*/true);
  }
  return own.to(shard().options());
}

void ShardedParameter::drop_gradient() {
  sharded_.mutable_grad().reset();
  forget_arrivals();
  accumulation_ = Accumulation::kSettled;
  used_ = false;
}

void ShardedParameter::settle_use(bool by_any_rank) {
  if (accumulation_ == Accumulation::kStarted && !by_any_rank) {
    gradient_place().reset();
  } else if (accumulation_ == Accumulation::kSettled && by_any_rank) {
    // Only other ranks used this parameter (an expert, for example). This rank's shard of the
    // gradient becomes zero, because optimizers skip undefined gradients.
    expect();
    accumulate(at::zeros(shard().sizes(), shard().options()), /*used=*/false);
    arrive();
  }
  accumulation_ = Accumulation::kSettled;
  used_ = false;
}

}  // namespace tessera::fsdp
