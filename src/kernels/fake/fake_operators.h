// How a FakeMode runs operators.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>

#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {

// The ways to run an operator in a FakeMode, and rules for result sizes that libtorch does not
// have.

/// How an operator on floating-point tensors is run without values.
enum class FakeKind : std::uint8_t {
  kThrough,  ///< unchanged: it is composed of other operators, or reads only sizes
  kInPlace,  ///< not run, because it only writes to its arguments
  kOut,      ///< its out= arguments are resized
  kMeta,     ///< run on the meta device to find the results' sizes
  kOwnRule,  ///< has a rule in make_fake_results()
  kItem,     ///< returns the value of a single-element tensor, which is 1
  kUnknown,
};
/// The kind of an operator; determined once for each operator.
FakeKind fake_kind(const c10::OperatorHandle& op);

/// Replaces the arguments on the stack by results, for an operator of kind kOwnRule.
void make_fake_results(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Passes a call to the FakeMode's observer that does not go through the dispatcher: a call of one
/// of our own kernels, which does not run in a FakeMode.
void observe_fake_call(const FakeCall& call);

}  // namespace tessera::kernels
