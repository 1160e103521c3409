#pragma once

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera::training {

/// Whether `own` is true on any rank of the mesh: the same on all of them, or some would end and
/// others wait for them. To be asked after each step, of StopSignals::received() or a time limit.
/// Collective over `mesh`, between the hosts: a device is not waited for.
bool stop_requested(bool own, const DeviceMesh& mesh);

}  // namespace tessera::training
TESSERA_API_END
