// Kernels of Tessera's own that compute on the fake as they do on a GPU.
#pragma once

#include <functional>
#include <string>

namespace fake_cuda {

/// What a launch with these arguments does; they are copied.
using HostForm = std::function<void()> (*)(void** arguments);

/// The host form of the kernel with this mangled name; null for kernels that compute nothing here.
HostForm host_form_of(const std::string& kernel);

}  // namespace fake_cuda
