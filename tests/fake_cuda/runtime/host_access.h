// The host has no access to the memory of a device.
#pragma once

namespace fake_cuda {

/// From now on a host that touches memory of a device leaves a violation in the report, with its
/// stack, and a line on standard error, and dies of the signal. Once a process.
void watch_host_access();

}  // namespace fake_cuda
