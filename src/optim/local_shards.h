// Local shards for optimizers and gradient norms: their gradients, their state, which shards are
// adjacent in memory, and which gradients this rank includes in a norm.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/export.h"
#include "tessera/kernels/detail/lists.h"
#include "tessera/nn/parameter.h"
#include "tessera/optim/clip_grad.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::optim {

/// Returns the gradient of a slot's persistent parameter; undefined if there is no gradient. A
/// gradient whose layout differs from the layout of the parameter (a pending sum) is redistributed
/// and stored back, which is collective.
at::Tensor slot_gradient(const nn::ParameterSlot& slot);

/// Throws Error, on all ranks of a root mesh, if gradients that must be equal on several ranks
/// differ: see nn::detail::check_copies(). A plain parameter must be equal on all ranks of the
/// largest root mesh. Each list of parameters is compared once; with TESSERA_DEBUG=1, at each call.
/// Does nothing if all parameters are plain, or if options.over is set, because other ranks can
/// then have other parameters. Collective over the root meshes of the distributed parameters.
void check_gradient_copies(const std::vector<nn::SlotPtr>& parameters, const char* what,
                           const NormOptions& options = {});

/// Whether tensor `next` begins in memory where `first` ends. Both tensors must be contiguous.
bool adjoins(const at::Tensor& first, const at::Tensor& next);

/// Returns a 1-D view of `numel` elements of the storage of `first`, from the first element of
/// `first` on. Autograd does not record the view.
at::Tensor flat_view(const at::Tensor& first, std::int64_t numel);

/// Returns the elements of `tensors` in fewer tensors: consecutive tensors that are adjacent in
/// memory, such as the shards of an FSDP unit, become one tensor. Types and devices can be mixed.
std::vector<at::Tensor> merge_adjoining(const std::vector<at::Tensor>& tensors);

/// Multiplies the tensors in place by `factor`, a plain 0-d tensor on any device. Each result is
/// rounded once; the multiplication uses the factor in fp32, or in fp64 for fp64 tensors.
void scale_by(const std::vector<at::Tensor>& tensors, const at::Tensor& factor);

/// The type in which an optimizer updates a tensor of type `dtype`: fp32 if `dtype` is narrower
/// than fp32, otherwise `dtype`.
c10::ScalarType update_type(c10::ScalarType dtype);

/// Makes zero tensors with the sizes and devices of `tensors`, and the types `dtypes` (one for each
/// tensor). Results of one type and device follow one another in one buffer, so that a kernel can
/// update many tensors as one. Each result begins at a multiple of 16 bytes, for vector accesses.
std::vector<at::Tensor> zeros_beside(const std::vector<at::Tensor>& tensors,
                                     const std::vector<c10::ScalarType>& dtypes);
/// Makes step counters (0-d, fp32, value 0): for each of `tensors`, one counter on the device of
/// the tensor, with memory as in zeros_beside().
std::vector<at::Tensor> counters_beside(const std::vector<at::Tensor>& tensors);

/// Returns `state`, which has the sizes of the local tensor of `parameter`, as a tensor with the
/// layout of the parameter.
at::Tensor with_layout_of(const at::Tensor& parameter, const at::Tensor& state);

/// A parameter's local shard, which an optimizer step updates.
struct ShardUpdate {
  std::size_t index;     ///< index of the shard's parameter in Optimizer::parameters()
  std::size_t group;     ///< index of the parameter's group in the optimizer
  at::Tensor parameter;  ///< the parameter's local tensor, without autograd
  at::Tensor gradient;   ///< the local gradient; undefined if there is no gradient
};

/// The factor by which a step multiplies all gradients (Optimizer::step): a number, or a plain 0-d
/// tensor on a device.
struct GradientFactor {
  double number = 1.0;  ///< the factor as a number, if `tensor` is undefined
  at::Tensor tensor = {};
};

/// The gradients of some parameters on one rank, in lists that a norm includes in different ways.
struct GradTerms {
  /// All local gradients. Tensors that are adjacent in memory are joined in all GradTerms lists.
  std::vector<at::Tensor> locals;
  /// Every gradient is in one of three lists: plain gradients, which are equal on every rank; local
  /// tensors that this rank includes in the norm; and copies that another rank includes.
  std::vector<at::Tensor> plain, owned, copies;
  /// The mesh of all ranks that have distributed parameters; undefined if all parameters are plain.
  DeviceMesh joint;
  /// The device of the first parameter; nullopt if there are no parameters.
  std::optional<c10::Device> device;
};

/// Collects the gradients of `parameters`. Reduces gradients that are pending sums, which is
/// collective over their meshes. The joint mesh (GradTerms::joint) is options.over, by default the
/// largest root mesh. Throws Error if the joint mesh does not contain the other meshes.
GradTerms collect_grads(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options);

/// Returns the p-norm of all gradients, the same on every rank of the joint mesh, and the factor
/// that clips the gradients to `max_norm` (undefined without max_norm). The norm and the factor are
/// plain 0-d tensors. Collective: one all-reduce.
kernels::NormAndFactor total_norm(const GradTerms& terms, double p,
                                  std::optional<double> max_norm = std::nullopt);

}  // namespace tessera::optim
TESSERA_API_FOR_TEST_END
