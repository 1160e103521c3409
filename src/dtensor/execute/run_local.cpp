#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/InferenceMode.h>

#include <optional>
#include <vector>

#include "autograd/autograd.h"
#include "execute/run_local.h"
#include "operators/operator_info.h"
#include "random/fills.h"
#include "rank/rank.h"
#include "redistribute/redistribute.h"
#include "tensor/distributed_impl.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/internals/detail/tensors.h"
#include "tessera/kernels/detail/random.h"
#include "views/views.h"

namespace tessera::detail {

namespace {

/// Turns inference mode off while the operator makes a view of a redistributed copy: libtorch
/// requires a version counter, which inference tensors lack.
class OrdinaryViewScope : NoCopy {
 public:
  explicit OrdinaryViewScope(const LocalRun& run) {
    if (run.viewed.defined() && !run.viewed.is_inference() && run.is_moved()) {
      ordinary_.emplace(false);
    }
  }
  ~OrdinaryViewScope() {
    if (ordinary_) {
      ordinary_.reset();
      replay_views();
    }
  }

 private:
  std::optional<c10::InferenceMode> ordinary_;
};

/// Returns the arguments of CallPlan::LocalCall, the operator that replaces the called operator:
/// values from the call plan, and local tensors of this call.
std::vector<c10::IValue> local_call_arguments(const LocalRun& run) {
  const CallPlan::LocalCall& local = *run.call.plan.local_call;
  const auto& schema = local.op.schema().arguments();
  std::vector<c10::IValue> arguments;
  for (std::size_t i = 0; i < local.arguments.size(); ++i) {
    arguments.push_back(to_ivalue(local.arguments[i], *schema[i].real_type(), run.locals));
  }
  return arguments;
}

/// Runs CallPlan::LocalCall, the operator that the call plan runs on local tensors instead of the
/// called operator. Removes the called operator's arguments from the stack.
void run_local_call(LocalRun& run) {
  const CallPlan::LocalCall& local = *run.call.plan.local_call;
  torch::jit::Stack& stack = run.call.stack;
  const std::vector<c10::IValue> arguments = local_call_arguments(run);
  stack.resize(run.call.first);
  stack.insert(stack.end(), arguments.begin(), arguments.end());
  local.op.callBoxed(stack);
  // The mean over a sharded dimension is a local sum, divided by the global number of elements.
  if (local.scale == 1.0) {
    return;
  }
  for (std::size_t i = run.call.first; i < stack.size(); ++i) {
    stack[i].toTensor().mul_(local.scale);
  }
}

/// Saves the arguments of a view operator whose base was redistributed. write_through() later runs
/// the view operator with these arguments on the gathered base.
void keep_view_arguments(LocalRun& run) {
  if (run.call.info.viewed < 0 || !run.is_moved()) {
    return;
  }
  const auto arguments = run.call.arguments();
  run.view_arguments = run.call.plan.local_call
                           ? local_call_arguments(run)
                           : std::vector<c10::IValue>(arguments.begin(), arguments.end());
}

void run_operator(LocalRun& run) {
  if (run.call.plan.local_call) {
    return run_local_call(run);
  }
  // A random operator on gathered tensors draws for the whole tensors on every rank, so all ranks
  // must draw the same numbers.
  std::optional<SeededGenerator> generator;
  if (run.call.plan.seeded) {
    generator.emplace(run.device, next_random_key());
  }
  if (run.call.info.traits.has(Trait::kUnsafeView)) {
    run.call.argument(0) =
        viewable(run.call.argument(0).toTensor(), run.call.argument(1).toIntVector());
  }
  run.call.op.callBoxed(run.call.stack);
}

/// If an operator without a sharding rule has resized an out= tensor, gives the distributed tensor
/// the new sizes. Throws Error, on all ranks, if the tensor was not empty.
void take_new_sizes(const LocalRun& run, DistributedTensorImpl& original, const at::Tensor& local) {
  const TensorSpecPtr spec = original.spec();
  const std::vector<std::int64_t> found = local.sizes().vec();
  const bool empty = original.numel() == 0;
  if (!empty && local.is_same(original.local())) {
    restore_sizes(local, spec->sizes, spec->strides);
  }
  TESSERA_CHECK(empty, run.call.info.name, " would resize a distributed tensor of sizes ",
                c10::IntArrayRef(spec->sizes), " to ", c10::IntArrayRef(found),
                "; pass a tensor that has the sizes of the result");
  original.give_count_to(local);
  // The resized tensor is replicated, because its placements may not permit the new sizes.
  original.replace(local, replicated_spec(run.call.plan, local));
}

/// Copies a written tensor's new value to the caller's tensor, unless the operator has written to
/// the caller's tensor itself.
void bring_back(const LocalRun& run, const LocalRun::Written& written) {
  const CallPlan& plan = run.call.plan;
  const CallPlan::Input& input = plan.inputs[written.input];
  const TensorSpecPtr& spec = input.spec;
  DistributedTensorImpl* impl = as_distributed(written.original);
  const at::Tensor& own = impl != nullptr ? impl->local() : written.original;
  const bool in_place = written.local.is_same(own) && input.written == spec->sharding.layout;
  if (in_place && impl == nullptr) {
    return;
  }
  if (!plan.has_rule && written.local.sizes() != spec->sizes) {
    return take_new_sizes(run, *impl, written.local);
  }
  if (in_place) {
    return;
  }
  const TensorSpecPtr left =
      intern_spec({{plan.replicated.mesh, input.written}, spec->sizes, spec->strides, spec->dtype});
  const at::Tensor value = redistribute_local(written.local, left, spec->sharding.layout);
  // If `value` shares memory with `own`, the two tensors can have different strides. A direct copy
  // could overwrite elements before reading them, so `value` is cloned first.
  copy_to_stride_zero(own, value.is_alias_of(own) ? value.clone() : value);
}

void write_back(LocalRun& run) {
  for (const LocalRun::Written& written : run.written) {
    bring_back(run, written);
  }
  // Writes to detached views are repeated on the bases last, because an operator can write both a
  // detached view and the base of the view.
  for (const at::Tensor& view : run.written_views) {
    write_through(view);
  }
}

/// Runs the kernel and copies new values back below autograd. Autograd has recorded the call on the
/// distributed tensors and must not see local tensors.
void run_on_local_tensors(LocalRun& run, CallKind kind) {
  const BelowAutograd guard;
  keep_view_arguments(run);
  if (kind == CallKind::kFailTogether) {
    run_or_fail_together(run.call.plan.replicated.mesh, run.call.info.name,
                         [&run] { run_operator(run); });
  } else {
    run_operator(run);
  }
  write_back(run);
}

}  // namespace

LocalRun::LocalRun(PlannedCall& c) : call(c) {
  for (const OperatorInfo::Return& result : call.info.returns) {
    if (result.written >= 0) {
      returned.push_back(call.argument(result.written));
    }
  }
  if (call.info.viewed >= 0 && call.argument(call.info.viewed).isTensor()) {
    viewed = call.argument(call.info.viewed).toTensor();
  }
}

void run_local(PlannedCall& call, CallKind kind) {
  LocalRun run(call);
  const OrdinaryViewScope ordinary(run);
  localize_arguments(run);
  rewrite_arguments(run);
  run_on_local_tensors(run, kind);
  wrap_results(run);
}

// Random operators that draw by global index. Each operator takes the next random key of the rank's
// sequence (fills.h), so the numbers do not depend on the mesh. Other random operators gather.

namespace {

/// Fills a Partial tensor with random numbers. A temporary tensor, with Replicate in place of
/// Partial, is filled and then converted to the terms of `self`.
void fill_partial(const at::Tensor& self, const PlannedCall& call, RandomKey key) {
  const DistributedTensorImpl& impl = *as_distributed(self);
  const TensorSpec& spec = *impl.spec();
  const ShardingSpec settled{spec.sharding.mesh, gradient_layout(spec.sharding.layout)};
  const auto values = make_distributed(
      at::empty(local_sizes(settled, spec.sizes), impl.local().options()), settled, spec.sizes);
  const at::Tensor& local = local_tensor(values);
  const RandomPlace place = random_place({call.info.name, values, random_source(), key});
  call.info.traits.fill()({local, place, key}, call.arguments());
  // Converts the random numbers to terms of a Partial tensor, without communication.
  impl.local().copy_(
      redistribute_local(local, as_distributed(values)->spec(), spec.sharding.layout));
}

void fill_distributed(const at::Tensor& self, const PlannedCall& call, RandomKey key) {
  const DistributedTensorImpl& impl = *as_distributed(self);
  if (impl.spec()->sharding.layout->is_partial()) {
    return fill_partial(self, call, key);
  }
  const RandomPlace place = random_place({call.info.name, self, random_source(), key});
  call.info.traits.fill()({impl.local(), place, key}, call.arguments());
}

struct Dropped {
  at::Tensor result;
  at::Tensor kept;  ///< the dropout mask, of type bool
};

Dropped drop(const at::Tensor& x, const at::Tensor& local, const ShardingSpec& spec, double p) {
  const auto kept = at::empty_like(local);
  const RandomKey key = next_random_key();
  // A call on meta tensors also takes a random key, so that later calls get the same keys as in a
  // run with real tensors.
  if (!kept.is_meta()) {
    const at::Tensor whole = make_distributed(kept, spec, x.sizes().vec());
    fill_random(kept, random_place({"native_dropout", whole, x, key}), kernels::Bernoulli{1 - p},
                key);
  }
  // If p = 1, all elements are dropped; 1 / (1 - p) would be a division by 0.
  const double scale = p < 1 ? 1 / (1 - p) : 0;
  return {local.mul(kept).mul_(scale), kept.to(at::kBool)};
}

}  // namespace

void check_rows_together(const PlannedCall& call) {
  const RandomRegionPtr& region = random_region();
  if (region == nullptr || region->rows() == nullptr) {
    return;
  }
  const int generator = call.info.generator;
  if (!call.plan.seeded && (generator < 0 || call.argument(generator).isNone())) {
    return;
  }
  const std::vector<at::Tensor> tensors = bind_call(call.info, call.arguments()).tensors;
  RandomPlace place;
  region->rows()->move(place, {call.info.name, tensors.front(), random_source(), {}},
                       tensors.front().sizes());
  TESSERA_CHECK(!place.is_part, call.info.name, kDrawsInOrder);
}

void run_random_inplace(PlannedCall& call) {
  const at::Tensor self = call.argument(0).toTensor();
  const DistributedTensorImpl& impl = *as_distributed(self);
  // check_writable() comes first, because a call that throws must change nothing.
  if (impl.detached_view()) {
    check_writable(impl, call.info.name);
  }
  const RandomKey key = next_random_key();
  const BelowAutograd guard;
  if (!impl.local().is_meta()) {
    fill_distributed(self, call, key);
    if (impl.detached_view()) {
      write_through(self);
    }
  }
  call.return_results({self});
}

void run_native_dropout(PlannedCall& call) {
  const at::Tensor x = call.argument(0).toTensor();
  const double p = call.argument(1).toDouble();
  const bool trains = call.argument(2).toOptional<bool>().value_or(true);
  TESSERA_CHECK(p >= 0 && p <= 1, "dropout: the probability is ", p, ", but must be in [0, 1]");
  DistributedTensorImpl& impl = *as_distributed(x);
  check_readable(impl, call.info.name);
  keep_gradient_layout(impl, x);

  const TensorSpecPtr spec = impl.spec();
  // Dropout applies to elements of the sum, so a Partial tensor is reduced first.
  const ShardingSpec settled{spec->sharding.mesh, gradient_layout(spec->sharding.layout)};
  const BelowAutograd guard;
  const auto local = redistribute_local(impl.local(), spec, settled.layout);
  const auto [result, kept] = trains && p > 0
                                  ? drop(x, local, settled, p)
                                  : Dropped{local.clone(), at::ones_like(local, at::kBool)};
  call.return_results({make_distributed(result, settled, spec->sizes),
                       make_distributed(kept, settled, spec->sizes)});
}

}  // namespace tessera::detail
