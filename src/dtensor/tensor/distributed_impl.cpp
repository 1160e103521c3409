// The wrapper as libtorch sees it. A TensorImpl answers most questions from its own fields, so
// everything that the spec knows is copied into them when a wrapper is made: that is on the path of
// every operator, hence a constructor that takes the cheap way where it can.

#include "tensor/distributed_impl.h"

#include <ATen/ops/empty.h>

#include <mutex>
#include <string>

#include "rank/below_autograd.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/parameter_name.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {
namespace {

/// The FQN of the parameter that `impl` is, or is a view of; empty if it is none.
std::string fqn_of(DistributedTensorImpl& impl) {
  return parameter_name(tensor_of(impl));
}

/// "parameter 'a.weight' ", or "a parameter " while it has no name.
std::string name_of(DistributedTensorImpl& impl) {
  const std::string name = fqn_of(impl);
  return name.empty() ? "a parameter " : "parameter '" + name + "' ";
}

/// " in the backward of Square", a torch::autograd::Function; empty in forward, where libtorch
/// notes no function.
std::string running_backward() {
  const std::string node = running_node();
  return node.empty() ? "" : " in the backward of " + node;
}

/// libtorch's message when data_ptr() is called: to print, or to compute with it.
std::string without_memory(DistributedTensorImpl& impl) {
  const std::string fqn = fqn_of(impl);
  return concat("the memory of a distributed tensor was asked for", running_backward(),
                ", which it lacks (", fqn.empty() ? "" : "'" + fqn + "', ", describe(*impl.spec()),
                "): read that of to_local() or full_tensor(), or call code that computes with "
                "memory, as a torch::autograd::Function may, by local_map; print "
                "tessera::DistributedTensor(x), or tessera::to_string of it");
}

}  // namespace

DistributedTensorImpl::DistributedTensorImpl(at::Tensor local, TensorSpecPtr spec)
    : TensorWrapper(local, spec->dtype), local_(std::move(local)), spec_(std::move(spec)) {
  replay_views();
  adopt_sizes();
  count_with(local_);
}

DistributedTensorImpl::DistributedTensorImpl(at::Tensor local, TensorSpecPtr spec,
                                             const c10::Storage& storage)
    : TensorWrapper(local, spec->dtype, storage), local_(std::move(local)), spec_(std::move(spec)) {
  adopt_sizes();
}

DistributedTensorImpl::DistributedTensorImpl(TransferPtr transfer, at::Tensor stand_in,
                                             TensorSpecPtr spec)
    : DistributedTensorImpl(std::move(stand_in), std::move(spec)) {
  local_ = at::Tensor();
  transfer_ = std::move(transfer);
}

/// At the first use of local(). The stand-in's version counter has been the wrapper's so far, so
/// the result takes that over. If the transfer throws it is kept, so that later uses throw as well.
void DistributedTensorImpl::wait_for_transfer() const {
  local_ = transfer_->finish();
  give_count_to(local_);
  transfer_.reset();
}

void DistributedTensorImpl::adopt_sizes() {
  set_shape(spec_->sizes, spec_->strides, spec_->geometry);
}

void DistributedTensorImpl::replace(at::Tensor local, TensorSpecPtr spec) {
  local_ = std::move(local);
  transfer_.reset();
  spec_ = std::move(spec);
  adopt_sizes();
}

/// Waits for a transfer, as local() does.
c10::intrusive_ptr<TensorWrapper> DistributedTensorImpl::copy() const {
  auto result = c10::make_intrusive<DistributedTensorImpl>(local(), spec_);
  result->detached_view_ = detached_view_;
  return result;
}

void DistributedTensorImpl::assign(const TensorWrapper* other) {
  const auto* from = dynamic_cast<const DistributedTensorImpl*>(other);
  TESSERA_CHECK(from != nullptr,
                "set_data of a distributed tensor needs a distributed tensor, found a plain one: "
                "distribute it first");
  // Optimizers and FSDP hold a parameter, and rely on its layout.
  TESSERA_CHECK(!requires_grad() || (from->sizes_default() == sizes_default() &&
                                     from->spec_->sharding == spec_->sharding),
                "set_data of ", name_of(*this), "of sizes ", sizes_default(), " and laid out as ",
                to_string(*spec_->sharding.layout), " needs a tensor of these sizes and layout, ",
                "found ", from->sizes_default(), " and ", to_string(*from->spec_->sharding.layout),
                "; copy values into it under a NoGradGuard (copy_) instead");
  replace(from->local(), from->spec_);
  take_kind_of(*from);  // a module's to() changes its parameters so
  detached_view_ = from->detached_view_;
}

/// libtorch calls this when the last strong reference is dropped while a weak one is left. The
/// local memory must not wait for the weak one.
void DistributedTensorImpl::release_resources() {
  local_.reset();
  transfer_.reset();
  detached_view_.reset();
  TensorWrapper::release_resources();
}

// The message needs an allocation: made when it is needed, not for every wrapper.
bool DistributedTensorImpl::has_storage() const {
  // const by the base class's declaration; the message is no part of a tensor's value.
  auto* self = const_cast<DistributedTensorImpl*>(this);
  std::string message = without_memory(*self);
  // One for all tensors: asking is rare.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  self->set_memory_error(std::move(message));
  return false;
}

const char* DistributedTensorImpl::tensorimpl_type_name() const {
  return "a tessera::DistributedTensor (take to_local() or full_tensor() first)";
}

at::Tensor wrap(at::Tensor local, TensorSpecPtr spec) {
  replay_views();  // for every wrapper, since guards of libtorch restore the state of a thread
  // Also in inference mode: a view of an ordinary tensor is not an inference tensor.
  const bool ordinary = !local.is_inference();
  if (const auto& storage = storage_of(local); storage && ordinary) [[likely]] {
    return at::Tensor(
        c10::make_intrusive<DistributedTensorImpl>(std::move(local), std::move(spec), storage));
  }
  return at::Tensor(c10::make_intrusive<DistributedTensorImpl>(std::move(local), std::move(spec)));
}

// The base class reads keys and device off a tensor, and the result is not there yet.
at::Tensor wrap_pending(TransferPtr transfer, const at::Tensor& like, TensorSpecPtr spec) {
  BelowAutograd guard;
  return at::Tensor(c10::make_intrusive<DistributedTensorImpl>(
      std::move(transfer), at::empty({0}, like.options()), std::move(spec)));
}

}  // namespace tessera::detail
