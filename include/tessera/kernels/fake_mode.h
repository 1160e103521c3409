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

/// An operator that a FakeMode has run without its values.
struct FakeCall {
  std::string name;                    ///< "aten::mm"
  std::vector<c10::IValue> arguments;  ///< in the order of the schema
  std::vector<at::Tensor> inputs;      ///< the tensors among the arguments, but for out=
  std::vector<at::Tensor> results;     ///< with those that it has written
};

/// The results of an operator in a FakeMode, from a call whose `results` are empty.
using FakeRule = std::function<std::vector<at::Tensor>(const FakeCall& call)>;

/// PyTorch's fake tensors, for C++ and tensors of the CPU. In its scope an operator on
/// floating-point tensors makes results of the right sizes, strides and types, in memory of the
/// CPU's allocator, and computes nothing. So a step of a model takes only the time of its calls,
/// and allocates and frees the memory of a real step. Operators on integers and booleans alone run
/// as usual, so that a program's decisions by indices and flags are right. item() of a
/// floating-point tensor is 1; other floating-point values are undefined. Integers that are
/// computed from floating-point numbers (topk, argmax) are 0.
///
/// It covers this thread and its backwards. Throws Error for an operator whose results it cannot
/// derive. One a process at a time; it needs an allocator whose memory costs nothing before it is
/// written, if the tensors are large (observe::count_tensor_memory).
class FakeMode {
 public:
  using Observer = std::function<void(const FakeCall&)>;
  /// `device`: the device that the step runs on. This library's fused operations then allocate as
  /// they do there. `observer`: called for each call, on the thread that makes it; may be empty.
  /// `rules`: what operators return whose sizes depend on values ("aten::nonzero"), on any tensors.
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
/// The device that a FakeMode is of; the CPU outside of any.
c10::DeviceType fake_device();

}  // namespace tessera::kernels
TESSERA_API_END
