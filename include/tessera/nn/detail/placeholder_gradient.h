#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// A tensor that stands in `.grad` of a parameter of which no gradient can be read. Every operator
/// on it throws Error with the reason, but those that run() does.
class PlaceholderGradient : public c10::TensorImpl {
 public:
  /// Has the sizes, type and device of `parameter`.
  explicit PlaceholderGradient(const at::Tensor& parameter);

  [[noreturn]] virtual void refuse() const = 0;
  /// Runs an operator whose first argument this is: true if it did.
  virtual bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack);

  // What Tensor::data() does, with which some optimizers begin.
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion&,
                                                         bool) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&&,
                                                         bool) const override;
};

/// `gradient` as one of them, or nullptr.
PlaceholderGradient* placeholder(const at::Tensor& gradient);

}  // namespace tessera::nn
TESSERA_API_END
