#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/internals/detail/dispatch_keys.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

/// An operator call that a FakeMode has run without values.
struct FakeCall {
  std::string name;                    ///< the operator's name, such as "aten::mm"
  std::vector<c10::IValue> arguments;  ///< all arguments, in the order of the schema
  std::vector<at::Tensor> inputs;      ///< the tensors among the arguments, except out= arguments
  std::vector<at::Tensor> results;     ///< the results, including tensors that the operator has
                                       ///< written
};

/// Returns the results of an operator in a FakeMode. It receives the call with empty `results`.
using FakeRule = std::function<std::vector<at::Tensor>(const FakeCall& call)>;

/// PyTorch's fake tensors, for C++ and CPU tensors. During the scope, an operator on floating-point
/// tensors makes results of the right sizes, strides and types, in memory of the CPU's allocator,
/// and computes nothing. So a step of a model takes only the time of its calls, and allocates and
/// frees the memory of a real step. Operators that use only integers and booleans run as usual, so
/// that a program's decisions by indices and flags are right. item() of a floating-point tensor is
/// 1; other floating-point values are undefined. Integers that are computed from floating-point
/// numbers (topk, argmax) are 0.
///
/// It applies to this thread and its backwards. Throws Error for an operator whose results it
/// cannot derive. Only one FakeMode per process may exist at a time. For large tensors it needs an
/// allocator whose memory costs nothing until it is written (observe::count_tensor_memory).
class FakeMode {
 public:
  using Observer = std::function<void(const FakeCall&)>;
  /// `device`: the device that the step is meant for; this library's fused operations allocate as
  /// on that device. `observer`: called for each call, on the thread that makes it; may be empty.
  /// `rules`: functions for operators whose result sizes depend on values ("aten::nonzero"), for
  /// any tensors.
  explicit FakeMode(c10::DeviceType device = c10::DeviceType::CPU, Observer observer = {},
                    std::map<std::string, FakeRule> rules = {});
  FakeMode(const FakeMode&) = delete;
  FakeMode& operator=(const FakeMode&) = delete;
  ~FakeMode();

 private:
  tessera::detail::IncludeKeys included_;
};

/// Whether the calling thread is in a FakeMode.
bool in_fake_mode();
/// The device that the active FakeMode simulates; the CPU if there is none.
c10::DeviceType fake_device();
/// Whether operators on x run on CUDA: x is on a GPU, or the active FakeMode simulates a GPU for
/// it.
bool runs_on_cuda(const at::Tensor& x);

}  // namespace tessera::kernels
TESSERA_API_END
