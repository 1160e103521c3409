#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"
#include "tessera/internals/detail/dispatch_keys.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// A call of an operator in a FakeMode.
struct FakeCall {
  std::string name;                    ///< the operator's name, such as "aten::mm"
  std::vector<c10::IValue> arguments;  ///< all arguments, in the order of the operator's schema
  std::vector<at::Tensor> inputs;      ///< the tensors among the arguments, except out= arguments
  std::vector<at::Tensor> results;     ///< results of the operator, and arguments written in place
};

/// A function that returns an operator's results in a FakeMode. `call` describes the operator call;
/// `call.results` is empty.
using FakeRule = std::function<std::vector<at::Tensor>(const FakeCall& call)>;

/// Like PyTorch's FakeTensorMode, for CPU tensors in C++. While a FakeMode exists, an operator on
/// floating-point tensors allocates results of the right sizes, strides and types by the CPU's
/// allocator, and computes nothing. A step of a model then takes only the time of its operator
/// calls, and allocates and frees the memory of a real step. Operators that use only integers and
/// booleans run as usual, so that indices and flags lead to the same decisions as in a real run.
/// item() of a floating-point tensor is 1; other floating-point values are undefined. Integers that
/// are computed from floating-point numbers (topk, argmax) are 0.
///
/// A FakeMode applies to the thread that creates the FakeMode, and to backward calls of that
/// thread. An operator throws Error if FakeMode cannot derive the sizes of its results. Only one
/// FakeMode per process may exist at a time. For large tensors FakeMode needs an allocator whose
/// memory uses no RAM before the first write, as in planning::plan().
class FakeMode : tessera::detail::NoCopy {
 public:
  using Observer = std::function<void(const FakeCall&)>;
  /// `device`: the device that the FakeMode simulates. Fused operations allocate as much memory as
  /// they would on that device. `observer`: a function that is called for each operator call, on
  /// the thread of the call; can be empty. `rules`: functions that return the results of operators
  /// whose result sizes depend on values ("aten::nonzero"), for tensors of all types.
  explicit FakeMode(c10::DeviceType device = c10::DeviceType::CPU, Observer observer = {},
                    std::map<std::string, FakeRule> rules = {});
  ~FakeMode();

 private:
  tessera::detail::IncludeKeys included_;
};

}  // namespace tessera::kernels
TESSERA_API_END
