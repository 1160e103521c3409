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
/// Reports a call of one of the library's own kernels to the FakeMode's observer. The dispatcher
/// does not see such a call, and the kernel does not run in a FakeMode.
void observe_fake_call(const FakeCall& call);

}  // namespace tessera::kernels
TESSERA_API_END
