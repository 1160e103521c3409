// Values of a thread that a backward takes along to the threads that it runs on. libtorch's
// ThreadLocalState carries a list of its own values and its debug info, which any library may add
// to; there is no public way to carry anything else.
//
// To 2.12 the kinds of debug info are an enum, whose values beyond libtorch's own are free;
// from 2.13 a kind is the address of its name.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// What is carried; each is a kind of debug info.
enum class Carried : std::uint8_t {
  kStrict,
  kOperatorMode,
  kRandomRegion,
  kPhaseRecorder,
  kMemoryScope,
  kModuleWatch,
};

/// The same on every call and in every library of the process.
c10::DebugInfoKind kind_of(Carried what);

}  // namespace tessera::detail
TESSERA_API_END
