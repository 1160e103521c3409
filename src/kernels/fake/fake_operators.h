// How a FakeMode runs operators, and rules for result sizes that libtorch does not have.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>

#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {

/// How an operator on floating-point tensors is run without values.
enum class FakeKind : std::uint8_t {
  kThrough,  ///< runs unchanged, because it is composed of other operators, or reads only sizes
  kInPlace,  ///< does not run, because it only writes to its arguments
  kOut,      ///< does not run; its out= arguments are resized
  kMeta,     ///< runs on the meta device to find the results' sizes
  kOwnRule,  ///< does not run; make_fake_results() has a rule for its results
  kItem,     ///< returns the value of a single-element tensor, which is 1
  kUnknown,
};
/// The kind of an operator; determined once for each operator.
FakeKind fake_kind(const c10::OperatorHandle& op);

/// Replaces the arguments on the stack by results, for an operator of kind kOwnRule.
void make_fake_results(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Passes a call of one of the library's own kernels to the FakeMode's observer. Such a call does
/// not go through the dispatcher, and the kernel does not run in a FakeMode.
void observe_fake_call(const FakeCall& call);

}  // namespace tessera::kernels
