// The step of run_local after the operator: copies new values to the caller's tensors.

#include "execute/run_local.h"
#include "tensor/distributed_impl.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/tensors.h"
#include "views/view_geometry.h"
#include "views/view_writes.h"

namespace tessera::detail {
namespace {

/// The operator gave an out= tensor other sizes, which is allowed for an empty one. Only without a
/// rule: there the operator ran on whole tensors, so all ranks have the same sizes and throw or
/// continue together.
void take_new_sizes(const LocalRun& run, DistributedTensorImpl& original, const at::Tensor& local) {
  const TensorSpecPtr spec = original.spec();
  const std::vector<std::int64_t> found = local.sizes().vec();
  const bool empty = original.numel() == 0;
  // The operator has resized the tensor itself: before the error it gets its sizes back.
  if (!empty && local.is_same(original.local())) {
    restore_sizes(local, spec->sizes, spec->strides);
  }
  TESSERA_CHECK(empty, run.call.info.name, " would resize a distributed tensor of sizes ",
                c10::IntArrayRef(spec->sizes), " to ", c10::IntArrayRef(found),
                ": pass one of the result's sizes");
  original.give_count_to(local);
  // An empty tensor's placements were for other sizes: the new value is replicated.
  original.replace(local, replicated_spec(run.call.plan, local));
}

/// Copies the new value of one written tensor to the caller's. Does nothing if the operator wrote
/// to the tensor itself in its own layout and sizes.
void bring_back(const LocalRun& run, const LocalRun::Written& written) {
  const CallPlan& plan = run.call.plan;
  const CallPlan::Input& input = plan.inputs[written.input];
  const TensorSpecPtr& spec = input.spec;
  DistributedTensorImpl* impl = as_distributed(written.original);
  const at::Tensor& own = impl != nullptr ? impl->local() : written.original;
  const bool in_place = written.local.is_same(own) && input.written == spec->sharding.layout;
  if (in_place && impl == nullptr) {
    return;  // one of libtorch's own, which it may resize
  }
  if (!plan.has_rule && written.local.sizes() != spec->sizes) {
    return take_new_sizes(run, *impl, written.local);
  }
  if (in_place) {
    return;
  }
  // From what the rule leaves, which is the tensor's own layout or replicated: never collective.
  const TensorSpecPtr left =
      intern_spec({{plan.replicated.mesh, input.written}, spec->sizes, spec->strides, spec->dtype});
  const at::Tensor value = redistribute_local(written.local, left, spec->sharding.layout);
  // A slice of the new value may be the tensor's own memory with other strides: a copy in between
  // keeps the write from reading what it has overwritten.
  copy_to_stride_zero(own, value.is_alias_of(own) ? value.clone() : value);
}

}  // namespace

void write_back(LocalRun& run) {
  for (const LocalRun::Written& written : run.written) {
    bring_back(run, written);
  }
  // After all tensors: a base that is gathered for it may have been written by the operator as
  // well.
  for (const at::Tensor& view : run.written_views) {
    write_through(view);
  }
}

}  // namespace tessera::detail
