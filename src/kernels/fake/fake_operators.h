// How a FakeMode runs operators.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>

#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {

// How a FakeMode runs an operator, and the sizes of results that libtorch has no rule for.

/// How an operator that touches floating-point numbers is run without them.
enum class FakeKind : std::uint8_t {
  kThrough,  ///< unchanged: it is made of other operators, or reads only sizes
  kInPlace,  ///< not at all: it only writes into its arguments
  kOut,      ///< its out= arguments get their sizes
  kMeta,     ///< on the meta device
  kOwnRule,  ///< by make_fake_results()
  kItem,     ///< a tensor's only value is 1
  kUnknown,
};
/// Looked up once for each operator.
FakeKind fake_kind(const c10::OperatorHandle& op);

/// Replaces the arguments on the stack by results, of a kOwnRule.
void make_fake_results(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Tells the observer of the FakeMode of a call that comes through no dispatcher: of a kernel of
/// our own, which does not run there.
void observe_fake_call(const FakeCall& call);

}  // namespace tessera::kernels
