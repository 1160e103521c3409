// The devices that the fake shows: H200s.
#pragma once

namespace fake_cuda {

/// The calling thread's device.
int current_device();

}  // namespace fake_cuda
