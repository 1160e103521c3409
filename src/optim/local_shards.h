// For optimizers and gradient norms: local shards, their gradients and their state, and which
// gradients this rank includes in a norm.
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
/// gradient with another layout than the parameter is redistributed (collective) and stored in
/// `.grad`.
at::Tensor slot_gradient(const nn::ParameterSlot& slot);

/// Throws Error, on all ranks, if gradients that must be equal on several ranks differ. Compares a
/// list of parameters only at the first call with the list, or always with TESSERA_DEBUG=1. Does
/// nothing if all parameters are plain or NormOptions::over is set. Collective over the root meshes
/// of the parameters.
void check_gradient_copies(const std::vector<nn::SlotPtr>& parameters, const char* what,
                           const NormOptions& options = {});

/// Whether tensor `next` begins in memory where `first` ends. Both tensors must be contiguous.
bool adjoins(const at::Tensor& first, const at::Tensor& next);

/// Returns a 1-D view of the storage of `first`: `numel` elements, beginning with the first element
/// of `first`. Autograd does not record the view.
at::Tensor flat_view(const at::Tensor& first, std::int64_t numel);

/// Joins consecutive tensors that are adjacent in memory, such as the shards of an FSDP unit, into
/// one tensor. `tensors` can have different dtypes and devices.
std::vector<at::Tensor> merge_adjoining(const std::vector<at::Tensor>& tensors);

/// Multiplies the tensors in place by `factor`, a plain 0-d tensor on any device. The product is
/// rounded once.
void scale_by(const std::vector<at::Tensor>& tensors, const at::Tensor& factor);

/// The dtype in which an optimizer updates a tensor of dtype `dtype`: fp32 if `dtype` is narrower
/// than fp32, otherwise `dtype`.
c10::ScalarType update_type(c10::ScalarType dtype);

/// Makes zero tensors with the sizes and devices of `tensors` and the types `dtypes`. Results of
/// one dtype and device are adjacent in memory, so that a kernel can update many tensors as one.
std::vector<at::Tensor> zeros_beside(const std::vector<at::Tensor>& tensors,
                                     const std::vector<c10::ScalarType>& dtypes);
/// Makes a step counter (0-d, fp32, value 0) for each of `tensors`, on the tensor's device. The
/// counters are laid out in memory like the results of zeros_beside().
std::vector<at::Tensor> counters_beside(const std::vector<at::Tensor>& tensors);

/// Makes optimizer state of the local tensor `state`, which has the sizes of `parameter`'s local
/// tensor. Returns a tensor with the parameter's layout.
at::Tensor with_layout_of(const at::Tensor& parameter, const at::Tensor& state);

struct ShardUpdate {
  std::size_t index;     ///< index of the shard's parameter in Optimizer::parameters()
  std::size_t group;     ///< index of the optimizer's parameter group that has the parameter
  at::Tensor parameter;  ///< the parameter's local tensor, without autograd
  at::Tensor gradient;   ///< the local gradient; undefined if there is no gradient
};

/// The factor for all gradients of a step (Optimizer::step): a number, or a plain 0-d tensor.
struct GradientFactor {
  double number = 1.0;  ///< the factor as a number, if `tensor` is undefined
  at::Tensor tensor = {};
};

/// One rank's gradients of some parameters, grouped by how a gradient norm counts the gradients.
struct GradTerms {
  /// All local gradients. In all lists, tensors that are adjacent in memory are joined.
  std::vector<at::Tensor> locals;
  /// Every gradient is in one list. `plain`: gradients that are equal on every rank. `owned`: local
  /// gradients that this rank counts. `copies`: local gradients that another rank counts.
  std::vector<at::Tensor> plain, owned, copies;
  /// The mesh of all ranks that have distributed parameters; undefined if all parameters are plain.
  DeviceMesh joint;
  std::optional<c10::Device> device;
};

/// Collects the gradients of `parameters`, and reduces Partial gradients (collective over their
/// meshes). GradTerms::joint is options.over, or by default the largest root mesh. Throws Error if
/// GradTerms::joint does not contain the other meshes.
GradTerms collect_grads(const std::vector<nn::SlotPtr>& parameters, const NormOptions& options);

/// Throws Error for a negative or NaN `max_norm` of clip_grad_norm_().
void check_max_norm(double max_norm);

/// Returns the p-norm of all gradients, and the factor that clips to `max_norm` (undefined without
/// `max_norm`). Both are plain 0-d tensors, equal on all ranks of the joint mesh. Collective.
kernels::NormAndFactor total_norm(const GradTerms& terms, double p,
                                  std::optional<double> max_norm = std::nullopt);

}  // namespace tessera::optim
TESSERA_API_FOR_TEST_END
