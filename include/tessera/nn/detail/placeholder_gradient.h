#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "tessera/export.h"
#include "tessera/internals/detail/tensor_wrapper.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// Stands in `.grad` of a parameter whose gradient cannot be read. Every operator on it throws
/// Error with the reason, except those that run() implements.
class PlaceholderGradient : public tessera::detail::PlaceholderTensor {
 public:
  using PlaceholderTensor::PlaceholderTensor;
  /// Runs an operator whose first argument this is: true if it did.
  virtual bool run(const c10::OperatorHandle& op, torch::jit::Stack& stack);
};

/// `gradient` as one of them, or nullptr.
PlaceholderGradient* placeholder(const at::Tensor& gradient);

}  // namespace tessera::nn
TESSERA_API_END
