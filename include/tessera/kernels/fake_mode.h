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

/// While a FakeMode exists, operators on floating-point CPU tensors allocate their results but
/// compute nothing, like PyTorch's FakeTensorMode. Operators on only integers and booleans run as
/// usual. item() of a floating-point tensor is 1; other floating-point values are undefined.
/// Integers computed from floating-point numbers (topk, argmax) are 0.
///
/// Applies to the thread that creates the FakeMode, and to backward calls of the thread. Only one
/// FakeMode may exist in a process. An operator throws Error if FakeMode cannot derive the sizes of
/// its results. Large tensors need an allocator that uses no RAM before the first write
/// (planning::plan()).
class FakeMode : tessera::detail::NoCopy {
 public:
  using Observer = std::function<void(const FakeCall&)>;
  /// `device`: the device whose memory use the fused operations imitate. `observer`: called for
  /// each operator call, on the same thread; can be empty. `rules`: functions that return results
  /// of operators whose result sizes depend on values ("aten::nonzero").
  explicit FakeMode(c10::DeviceType device = c10::DeviceType::CPU, Observer observer = {},
                    std::map<std::string, FakeRule> rules = {});
  ~FakeMode();

 private:
  tessera::detail::IncludeKeys included_;
};

}  // namespace tessera::kernels
TESSERA_API_END
