// Operators that are not libtorch's, in each way of implementing one.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <utility>

namespace tessera::own_operators {

/// The operator own_gradients::`name`.
template <class Signature, class... Arguments>
auto call(const char* name, Arguments&&... arguments) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow((std::string("own_gradients::") + name).c_str(), "")
      .typed<Signature>()
      .call(std::forward<Arguments>(arguments)...);
}
at::Tensor call_binary(const char* name, const at::Tensor& x, const at::Tensor& w);
at::Tensor call_unary(const char* name, const at::Tensor& x);

/// An autograd function without an operator.
at::Tensor cube_by_hand(const at::Tensor& x);

}  // namespace tessera::own_operators
