// The version of these headers. CMakeLists.txt reads it here.
#pragma once

/// As in semantic versioning: until 1.0 a new minor version may change the interface.
#define TESSERA_VERSION "0.3.0"

/// The interface version that programs and libraries must share: libtessera_core.so.0.3, for
/// example.
#define TESSERA_SOVERSION "0.3"
