#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <typeindex>
#include <typeinfo>

namespace tessera::detail {

/// What an autograd function of a layer above does along dimensions. It tells what a plain tensor
/// that the function made is a part of, and whether a part was taken for a whole.
struct FunctionKind {
  /// Each dimension of the result is the same one of the arguments, from the right.
  bool aligned = false;
  /// The same of result i and argument i alone.
  bool each_aligned = false;
  /// It computes across the last dimension of its first argument.
  bool reads_last_dim = false;
};

/// `node`: the type of the function's node in autograd's graph. Before main(), as other threads
/// read without a lock.
void register_function_kind(std::type_index node, FunctionKind kind);

/// Says it of `Function`, beside which one of these is defined. A function of which nobody says
/// anything is taken for a program's: what that does is not known.
template <class Function>
struct KindOfFunction {
  explicit KindOfFunction(FunctionKind kind) {
    register_function_kind(typeid(torch::autograd::CppNode<Function>), kind);
  }
};

}  // namespace tessera::detail
