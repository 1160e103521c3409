// libtorch's profiler of operators and kernels, as torch.profiler in Python drives it. In C++ it
// has a class for the legacy one alone.
//
// No version differs in what is used.
//
// Canary: KernelProfilerCanary.
#pragma once

#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// One at a time in a process, Python's included.
bool profiler_runs();
/// `gpu`: its kernels too.
void begin_profile(bool gpu);
/// Drops what was recorded.
void drop_profile();
/// Writes it, as a Chrome trace, and ends the profile. Says nothing of what fails.
void save_profile(const std::string& file);

}  // namespace tessera::detail
TESSERA_API_END
