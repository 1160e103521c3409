#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Device.h>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::kernels {

struct FakeCall;

/// Whether the calling thread is in a FakeMode (fake_mode.h).
bool in_fake_mode();
/// Returns the device that the active FakeMode simulates; the CPU if no FakeMode is active.
c10::DeviceType fake_device();
/// Whether operators on x run on CUDA: x is on a GPU, or the active FakeMode simulates a GPU.
bool runs_on_cuda(const at::Tensor& x);
/// Reports a call of a Tessera kernel to the FakeMode's observer, because the dispatcher does not
/// see the call. In a FakeMode the kernel does not run.
void observe_fake_call(const FakeCall& call);

}  // namespace tessera::kernels
TESSERA_API_END
