#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <functional>
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

/// What PyTorch calls fake tensors, for C++ and tensors of the CPU: in its scope an operator on
/// floating-point tensors makes results of the right sizes, strides and types, in memory of the
/// CPU's allocator, and computes nothing. So a step of a model of any size takes the time of its
/// calls alone, and allocates and frees what a real one would. Operators on integers and booleans
/// alone run as usual: what a program decides by indices and flags is right. item() of a
/// floating-point tensor is 1; their other values mean nothing.
///
/// It covers this thread and its backwards. Throws Error for an operator whose results it cannot
/// derive. One a process at a time; it needs an allocator whose memory costs nothing before it is
/// written, if the tensors are large (observe::count_tensor_memory).
class FakeMode {
 public:
  using Observer = std::function<void(const FakeCall&)>;
  /// `device`: the device that the step runs on. This library's fused operations then allocate as
  /// they do there. `observer`: called for each call, on the thread that makes it; may be empty.
  explicit FakeMode(c10::DeviceType device = c10::DeviceType::CPU, Observer observer = {});
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
