// The devices that the fake shows: H200s.
#pragma once

namespace fake_cuda {

/// The calling thread's device.
int current_device();

/// The calling thread's device gets a context, if it has none: some hundred MiB of its memory.
void use_device();
bool has_context(int device);

}  // namespace fake_cuda
