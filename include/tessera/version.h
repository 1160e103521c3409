// The version of these headers. CMakeLists.txt reads the version from this file.
#pragma once

/// Semantic versioning: until 1.0 a new minor version can change the interface.
#define TESSERA_VERSION "0.3.0"

/// The version of the binary interface, part of the library names, such as libtessera_core.so.0.3.
#define TESSERA_SOVERSION "0.3"
