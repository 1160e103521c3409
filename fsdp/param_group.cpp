#include "param_group.h"
#include "tessera/comm/detail/scopes.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include "tessera/core/detail/environment.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/kernels/detail/lists.h"

namespace tessera::fsdp {

// Before the first forward, and after a conversion or a load, a group's shards move into one flat
// buffer for the all-gather. Optimizers reference the shards, so the tensor objects stay the same.

namespace {

FlatBufferLayout layout_of(const std::vector<ShardedParameter>& parameters, const DataMesh& mesh,
                           const MixedPrecisionPolicy& policy) {
  std::vector<ShardShape> shapes;
  for (const ShardedParameter& parameter : parameters) {
    shapes.push_back(parameter.shape());
  }
  // grouped() gives all parameters of a group one dtype and one ShardHome.
  const ShardedParameter& first = parameters.front();
  return {shapes, first.dtype(), policy, first.home(), mesh.device()};
}

}  // namespace

ParameterGroupShards::ParameterGroupShards(std::vector<ShardedParameter> parameters,
                                           const DataMesh& mesh, const MixedPrecisionPolicy& policy)
    : parameters_(std::move(parameters)),
      mesh_(mesh),
      policy_(policy),
      layout_(layout_of(parameters_, mesh_, policy_)) {}

bool ParameterGroupShards::adopt() {
  bool changed = false;
  for (ShardedParameter& parameter : parameters_) {
    changed |= parameter.adopt();
  }
  return changed;
}

/// Compares the addresses of the shards, because model.to(dtype), a load or an optimizer can have
/// replaced the memory of a shard.
bool ParameterGroupShards::laid_out() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& unsharded = parameters_[i].unsharded();
    if (!unsharded.defined()) {
      return false;
    }
    const at::Tensor& shard = parameters_[i].shard();
    const at::Tensor place = layout_.shares_memory() ? local_tensor(unsharded)
                             : layout_.has_flat()
                                 ? shard_of(flat_, layout_.segments()[i], mesh_.shard.local_rank())
                                 : shard;
    if (shard.numel() > 0 && shard.const_data_ptr() != place.const_data_ptr()) {
      return false;
    }
  }
  return true;
}

void ParameterGroupShards::lay_out() {
  check_devices();
  check_types();
  layout_ = layout_of(parameters_, mesh_, policy_);
  if (!layout_.has_flat()) {
    return;
  }
  const c10::AutoGradMode no_grad(false);
  // Collectives send the padding. Zeros make the padding the same in every run.
  flat_ = at::zeros({flat_numel(layout_.segments())},
                    parameters_.front().shard().options().pinned_memory(layout_.home().pinned));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor place = shard_of(flat_, layout_.segments()[i], mesh_.shard.local_rank());
    // Each old shard's memory is freed with its last reference, so two copies of the shards can
    // exist for a moment.
    place.copy_(parameters_[i].shard());
    tessera::detail::move_onto(parameters_[i].shard(), place.storage(), place.storage_offset());
  }
}

std::uint64_t ParameterGroupShards::versions() const {
  std::uint64_t sum = 0;
  for (const ShardedParameter& parameter : parameters_) {
    // Version counters only grow, so two equal sums mean that no counter has changed.
    sum += parameter.version();
  }
  return sum;
}

void ParameterGroupShards::begin_use() {
  std::ranges::for_each(parameters_, &ShardedParameter::begin_use);
}

std::string ParameterGroupShards::lost_write() const {
  if (layout_.shares_memory()) {
    return "";
  }
  const auto written = std::ranges::find_if(parameters_, &ShardedParameter::written_in_use);
  return written == parameters_.end() ? "" : written->name();
}

bool ParameterGroupShards::any_replaced() const {
  return std::ranges::any_of(parameters_, &ShardedParameter::is_replaced);
}

void ParameterGroupShards::check_devices() const {
  std::string meta;
  for (const ShardedParameter& parameter : parameters_) {
    // On the mesh of a comm::meta_world, parameters can stay on the meta device.
    if (parameter.device().is_meta() && !layout_.home().device.is_meta()) {
      meta += (meta.empty() ? "'" : ", '") + parameter.name() + "'";
    }
  }
  TESSERA_CHECK(meta.empty(), "forward of a sharded module was called, but its parameters ", meta,
                " are still on the meta device; call nn::to_empty and fill the parameters first");
  const ShardHome& home = layout_.home();
  for (const ShardedParameter& parameter : parameters_) {
    TESSERA_CHECK(parameter.device() == home.device,
                  "forward of a sharded module was called, but the shard of parameter '",
                  parameter.name(), "' is on ", parameter.device(), " instead of ", home.device,
                  "; create the shard there (nn::to_empty), or change the offload_policy");
  }
}

void ParameterGroupShards::check_types() const {
  const ShardedParameter& first = parameters_.front();
  for (const ShardedParameter& parameter : parameters_) {
    TESSERA_CHECK(parameter.dtype() == first.dtype(),
                  "forward of a sharded module was called, but parameter '", parameter.name(),
                  "' is ", parameter.dtype(), " and '", first.name(), "' is ", first.dtype(),
                  "; both had the same type when fully_shard was called: convert both parameters, "
                  "or convert before fully_shard");
  }
}

// Every wait() and record() in GatheredState is needed: a stream must not reuse memory before the
// last user of the memory has finished. start_unshard() lets a gather overlap another unit's
// computation.

namespace {

using comm::Lane;
using comm::LaneScope;

/// Runs `act`, which starts an all-gather or waits for one. If ranks called different collectives,
/// the error gets a hint about units that only some ranks run.
template <class Act>
void gathering(Act&& act) {
  try {
    act();
    // A PeerError reports the failure of another rank and therefore gets no hint.
  } catch (const comm::PeerError&) {
    throw;
  } catch (const Error& error) {
    fail(error.what(), kCallOnEveryRank);
  }
}

}  // namespace

GatheredState::GatheredState(ParameterGroupShards& shards, std::int64_t post_forward_mesh_size,
                             std::shared_ptr<const Settings> settings)
    : shards_(&shards),
      settings_(std::move(settings)),
      post_forward_(shards.mesh(), post_forward_mesh_size) {}

void GatheredState::lay_out(CommContext& context) {
  const c10::AutoGradMode no_grad(false);
  // A conversion can have changed dtypes or devices, so the layout of the flat buffer is read
  // again.
  const FlatBufferLayout& lay = layout();
  if (!lay.shares_memory()) {
    unsharded_ = UnshardedTensors(lay.segments(), lay.compute_dtype(), lay.device(),
                                  gathers_in_place(), post_forward_.count());
  }
  std::vector<ShardedParameter>& parameters = shards_->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    // The shard is detached, so that forward's leaf tensor does not share the shard's gradient.
    parameters[i].set_unsharded(lay.shares_memory() ? parameters[i].shard().detach()
                                                    : unsharded_.tensors()[i]);
  }
  // The all-gather sends the flat buffer, so its stream waits for the copies into the flat buffer.
  context.streams().order(Lane::kCompute, Lane::kAllGather);
}

/// Whether the all-gather can write directly into the unsharded tensors.
bool GatheredState::gathers_in_place() const {
  return layout().splits_rows() && layout().ranks() > 1 && group().moves_groups_in_place();
}

bool GatheredState::start_unshard(CommContext& context) {
  if (phase_.now() != GatherPhase::kSharded || layout().ranks() == 1) {
    return false;
  }
  const c10::AutoGradMode no_grad(false);
  context.streams().note("all_gather " + settings_->label);
  const LaneScope lane(context.streams(), Lane::kAllGather);
  // The phase changes first: if start_gather() throws, discard_gather() must see the phase
  // kGathering.
  phase_.enter(GatherPhase::kGathering, settings_->label);
  try {
    start_gather(context);
  } catch (...) {
    discard_gather();
    throw;
  }
  return true;
}

void GatheredState::start_gather(CommContext& context) {
  if (post_forward_.kept()) {
    // Each cached part (Options::post_forward_mesh_size) is a range of all unsharded memory, so
    // this gather fills all unsharded tensors.
    allocate_in_lane(context);
    gathering([&] {
      gather_ = post_forward_.start_gather(unsharded_.flat(), settings_->label, context.streams());
    });
    return;
  }
  gathered_versions_ = shards_->versions();
  const comm::PurposeScope purpose(group(), settings_->label);
  // If the shards have the compute dtype and device, send_ is the flat buffer, not a copy.
  send_ = shards_->flat().to(layout().device(), layout().compute_dtype(), /*non_blocking=*/true);
  const bool in_place = !unsharded_.padded().empty();
  if (in_place) {
    allocate_in_lane(context);
  }
  gathering([&] { in_place ? start_gather_in_place() : start_gather_packed(context); });
}

/// Allocates the unsharded memory on the all-gather stream, after the last user of reused memory
/// has finished.
void GatheredState::allocate_in_lane(CommContext& context) {
  memory_ = context.pool().acquire(unsharded_.bytes(), at::kByte, Lane::kAllGather);
  unsharded_.lend(memory_->tensor);
}

void GatheredState::start_gather_in_place() {
  std::vector<at::Tensor> outputs;
  std::vector<at::Tensor> inputs;
  const std::vector<Segment>& segments = layout().segments();
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const std::int64_t numel = segments[i].shape.padded_numel();
    // Communicators reject empty tensors.
    if (numel > 0) {
      inputs.push_back(send_.narrow(0, segments[i].offset, numel));
      outputs.push_back(unsharded_.padded()[i]);
    }
  }
  if (!inputs.empty()) {
    gather_ = group().all_gather_group(outputs, inputs);
  }
}

void GatheredState::start_gather_packed(CommContext& context) {
  gathered_ =
      context.pool().acquire(group().size() * send_.numel(), send_.scalar_type(), Lane::kAllGather);
  gather_ = group().all_gather(gathered_->tensor.view({group().size(), send_.numel()}), send_);
}

void GatheredState::unshard(CommContext& context) {
  // Counts writes even if the group is already unsharded, so that reuse and a new gather have equal
  // effects.
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.count_writes();
  }
  if (unsharded()) {
    return;
  }
  start_unshard(context);
  context.streams().note("unshard " + settings_->label);
  try {
    fill(context);
  } catch (...) {
    discard_gather();
    throw;
  }
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.set_gathered(true);
  }
  phase_.enter(GatherPhase::kUnsharded, settings_->label);
}

void GatheredState::install_unsharded() {
  if (installed_ || !unsharded()) {
    return;
  }
  // Optimizers and checkpoints still see the shards (nn::ParameterSlot::persistent).
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.install_unsharded();
  }
  shards_->begin_use();
  installed_ = true;
}

void GatheredState::install_sharded() {
  if (!std::exchange(installed_, false)) {
    return;
  }
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.install_sharded();
  }
}

/// The compute stream waits for the gather. The all-gather stream waits too, because this stream
/// owns the gather's input.
void GatheredState::wait_for_gather(CommContext& context) {
  if (layout().ranks() == 1) {
    return;
  }
  {
    const LaneScope lane(context.streams(), Lane::kAllGather);
    if (gather_ != nullptr) {
      try {
        gathering([work = std::exchange(gather_, nullptr)] { work->wait(); });
      } catch (...) {
        discard_gather();
        throw;
      }
    }
    send_.reset();
  }
  context.streams().order(Lane::kAllGather, Lane::kCompute);
  post_forward_.end_gather();
  post_forward_.drop();  // backward uses the cached part only once
}

void GatheredState::discard_gather() {
  gather_ = nullptr;
  send_.reset();
  post_forward_.end_gather();
  post_forward_.drop();
  gathered_.reset();
  unsharded_.free();
  memory_.reset();
  if (phase_ == GatherPhase::kGathering) {
    phase_.enter(GatherPhase::kSharded, settings_->label);
  }
}

void GatheredState::fill(CommContext& context) {
  if (layout().shares_memory()) {
    return;
  }
  wait_for_gather(context);
  if (memory_) {
    return;
  }
  unsharded_.allocate();
  // Autograd must not count this copy as a write to the parameters.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::vector<at::Tensor>& tensors = unsharded_.tensors();
  if (gathered_) {
    const std::int64_t ranks = layout().ranks();
    const at::Tensor rows = gathered_->tensor.view({ranks, gathered_->tensor.numel() / ranks});
    unpack(rows, layout().segments(), tensors);
    context.pool().release(*std::exchange(gathered_, std::nullopt),
                           context.streams().record(Lane::kCompute));
    return;
  }
  // On one rank, shards are copied if the unsharded tensors have another dtype or device.
  gathered_versions_ = shards_->versions();
  std::vector<at::Tensor> shards;
  for (const ShardedParameter& parameter : shards_->parameters()) {
    shards.push_back(parameter.shard());
  }
  kernels::copy_all(tensors, shards, /*non_blocking=*/true);
}

/// Frees the unsharded memory: memory of the all-gather stream returns to the pool, for reuse after
/// the compute stream has finished. On a CPU the memory is freed at once.
void GatheredState::free_unsharded(CommContext& context) {
  if (!unsharded_.allocated() && !memory_) {
    return;
  }
  unsharded_.free();
  if (!memory_) {
    return;
  }
  if (auto event = unsharded() ? context.streams().record(Lane::kCompute) : nullptr) {
    // The pool keeps only this unit's memory for the next gather; idle memory of earlier units is
    // freed.
    context.pool().drop(Lane::kAllGather);
    context.pool().release(*std::move(memory_), std::move(event));
  }
  memory_.reset();
}

void GatheredState::free_gathered(CommContext& context) {
  if (phase_ == GatherPhase::kSharded) {
    return;
  }
  if (unsharded()) {
    context.streams().note("reshard " + settings_->label);
    install_sharded();
    for (ShardedParameter& parameter : shards_->parameters()) {
      parameter.set_gathered(false);
    }
  }
  if (gather_ != nullptr) {  // the all-gather of an unused prefetch still runs
    wait_for_gather(context);
  }
  if (gathered_) {
    context.pool().release(*std::exchange(gathered_, std::nullopt), nullptr);
  }
  free_unsharded(context);
  phase_.enter(GatherPhase::kSharded, settings_->label);
}

void GatheredState::reshard(CommContext& context) {
  free_gathered(context);
  post_forward_.drop();
}

void GatheredState::reshard_for_now(CommContext& context) {
  if (unsharded() && post_forward_.enabled() && !post_forward_.kept()) {
    const c10::AutoGradMode no_grad(false);
    post_forward_.keep(unsharded_.flat(), context.streams());
  }
  free_gathered(context);
}

void GatheredState::reshard_unused(CommContext& context) {
  if (is_gathering()) {
    free_gathered(context);
  }
}

void GatheredState::discard(CommContext& context) {
  try {
    // The wait for the gather can throw, so reshard() first puts the shards into the model.
    reshard(context);
  } catch (const Error&) {
    // After a failed all-gather nothing is left to free, and the caller throws its own error.
  }
}

bool GatheredState::is_current() const {
  // The gathered copies are outdated if shards were written, replaced or moved.
  return holds_copies() && gathered_versions_ == shards_->versions() && !shards_->any_replaced() &&
         shards_->laid_out();
}

void GatheredState::add_groups(std::vector<comm::Communicator*>& groups) {
  if (layout().ranks() > 1) {
    groups.push_back(&group());
  }
  // The first call of group() is collective. So the condition for this call must be equal on all
  // ranks.
  if (post_forward_.enabled()) {
    groups.push_back(&post_forward_.group());
  }
}

// GradientState has a parameter group's unreduced gradients. With gradient sync, gradients are
// reduced in each backward. Without gradient sync, gradients are stored unsharded for a later
// reduction.

namespace {

/// keep_sample() saves only gradients with at most this many elements: norm weights and biases.
constexpr std::int64_t kSampleNumel = 8192;

}  // namespace

bool GradientState::any_unsharded() const {
  return std::ranges::any_of(shards_->parameters(), [](const ShardedParameter& parameter) {
    return parameter.unsharded().defined() && parameter.unsharded().grad().defined();
  });
}

void GradientState::drop_unsharded() {
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.drop_unsharded();
  }
}

void GradientState::drop_all() {
  drop_unsharded();
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.drop_gradient();
  }
}

/// The gradients are stored in reduce_dtype, the dtype of the later sum; a narrower dtype would
/// lose bits.
void GradientState::set_aside() {
  const c10::AutoGradMode no_grad(false);
  for (ShardedParameter& parameter : shards_->parameters()) {
    // Every rank must decide alike. So the test is whether a gradient can exist, not whether this
    // rank has computed one.
    if (!parameter.left_out() && (parameter.trainable() || parameter.has_unreduced())) {
      const c10::ScalarType dtype = shards_->layout().reduce_dtype();
      parameter.add_unreduced(parameter.take_unsharded(dtype), dtype);
    }
  }
}

void GradientState::restore_accumulated_grads() {
  const c10::AutoGradMode no_grad(false);
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.restore_accumulated_grads();
  }
}

bool GradientState::awaits_reduction() const {
  return std::ranges::any_of(shards_->parameters(), [this](const ShardedParameter& parameter) {
    return !parameter.left_out() && (parameter.has_unreduced() ||
                                     (settings_->all_reduce && parameter.has_left_to_replicas()));
  });
}

void GradientState::mark_expected() {
  for (ShardedParameter& parameter : shards_->parameters()) {
    parameter.mark_expected();
  }
}

/// Warns on the rank that computed a NaN or Inf, before the reduction spreads the value. Used only
/// with debug checks, because the CPU waits for the device.
void GradientState::warn_of_nonfinite(const ShardedParameter& parameter,
                                      const at::Tensor& gradient) const {
  if (tessera::detail::debug_checks() && gradient.defined() &&
      !gradient.isfinite().all().item<bool>()) {
    TORCH_WARN("rank ", shards_->mesh().all.world()->rank(), ": the gradient of ",
               describe(*parameter.slot()),
               " is not finite before it is reduced; look at this rank's rows of the batch");
  }
}

/// Returns this backward's gradient plus the stored gradients of earlier backwards.
UnshardedGradient GradientState::gradient_to_reduce(ShardedParameter& parameter) const {
  const c10::ScalarType dtype = shards_->layout().reduce_dtype();
  UnshardedGradient gradient = parameter.take_unsharded(dtype);
  warn_of_nonfinite(parameter, gradient.local);
  if (parameter.has_unreduced()) {
    parameter.add_unreduced(gradient, dtype);
    gradient = parameter.take_unreduced();
  }
  PartialGradGroup& sum = parameter.partial_group();
  sum.note(gradient);
  return converted(std::move(gradient), sum.group(), dtype);
}

/// Saves the smallest gradient before the reduction spreads a NaN to all ranks, to find later
/// whether this rank computed the NaN. Checking all gradients would be slow.
void GradientState::keep_sample(const std::vector<ShardedParameter*>& parameters,
                                const std::vector<UnshardedGradient>& gradients) {
  sampled_.reset();
  sample_.reset();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& gradient = gradients[i].local;
    const std::int64_t least = sample_.defined() ? sample_.numel() : kSampleNumel + 1;
    if (gradient.defined() && gradient.numel() > 0 && gradient.numel() < least) {
      sampled_ = parameters[i]->slot();
      sample_ = gradient;
    }
  }
}

bool GradientState::brought_nonfinite(const nn::ParameterSlot& slot) const {
  return sampled_.get() == &slot && !sample_.isfinite().all().item<bool>();
}

void GradientState::start_reduce(CommContext& context) {
  std::vector<ShardedParameter*> trainable;
  std::vector<UnshardedGradient> gradients;
  for (ShardedParameter& parameter : shards_->parameters()) {
    // All ranks must reduce the same parameters. So the list has every parameter that can have a
    // gradient on any rank, even a parameter that was frozen after a micro-batch.
    if (parameter.left_out()) {
      continue;
    }
    if (parameter.trainable() || parameter.has_unreduced() || parameter.has_left_to_replicas()) {
      trainable.push_back(&parameter);
      gradients.push_back(gradient_to_reduce(parameter));
      parameter.expect();
    }
  }
  keep_sample(trainable, gradients);
  if (!trainable.empty()) {
    const auto ranks = static_cast<double>(batch_ranks_.value_or(shards_->mesh().ranks()));
    reduction_.emplace(std::move(trainable), std::move(gradients), shards_->mesh(),
                       shards_->layout().reduce_dtype(),
                       settings_->gradient_divisor.value_or(ranks), settings_, context);
  }
}

void GradientState::finish_reduce(CommContext& context) {
  if (reduction_) {
    reduction_->finish(context);
    reduction_.reset();
  }
}

void GradientState::forget_reduction(CommContext& context) {
  reduction_.reset();
  for (ShardedParameter& parameter : shards_->parameters()) {
    context.sums().forget(&parameter);
    parameter.forget_arrivals();
  }
}

// Only prepare() changes the layouts of the shards and the unsharded tensors.

namespace {

std::unique_ptr<ParameterGroupShards> shard_all(const std::vector<ParameterSpec>& specs,
                                                const MixedPrecisionPolicy& policy) {
  // Each ShardedParameter puts its shard into the model. No constructor throws, because
  // checked_spec() has rejected unsuitable parameters.
  std::vector<ShardedParameter> parameters;
  for (const ParameterSpec& spec : specs) {
    parameters.emplace_back(spec);
  }
  return std::make_unique<ParameterGroupShards>(std::move(parameters), specs.front().mesh, policy);
}

}  // namespace

ParameterGroup::ParameterGroup(const std::vector<ParameterSpec>& specs,
                               const MixedPrecisionPolicy& policy,
                               std::int64_t post_forward_mesh_size,
                               const std::shared_ptr<const Settings>& settings)
    : shards_(shard_all(specs, policy)),
      gathered_(*shards_, post_forward_mesh_size, settings),
      gradients_(*shards_, settings) {}

void ParameterGroup::prepare(CommContext& context) {
  // Without changes adopt() and laid_out() only compare pointers, so every iteration can call both.
  const bool replaced = shards_->adopt();
  if (!replaced && shards_->laid_out()) {
    return;
  }
  // The gathered tensors have the old memory or the old dtype, so they are freed.
  gathered_.reshard(context);
  shards_->lay_out();
  gathered_.lay_out(context);
}

void ParameterGroup::add_replica_groups(std::vector<comm::Communicator*>& groups) {
  if (mesh().replicas() > 1) {
    groups.push_back(&mesh().replicate.group());
  }
}

}  // namespace tessera::fsdp
