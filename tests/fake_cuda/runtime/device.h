// The devices that the fake shows: H200s.
#pragma once

namespace fake_cuda {

/// Of the calling thread.
int current_device();

}  // namespace fake_cuda
