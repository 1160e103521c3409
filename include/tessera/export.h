// Macros for the symbols that a library exports. Sources are compiled with hidden visibility, so
// only declarations between TESSERA_API_BEGIN and TESSERA_API_END in a header are exported.
#pragma once

/// Exports one declaration.
#define TESSERA_API __attribute__((visibility("default")))

// TESSERA_API_BEGIN and TESSERA_API_END are pragmas: g++ rejects a visibility attribute on a nested
// namespace, and clang does not apply such an attribute to functions.

/// Exports all declarations up to TESSERA_API_END; used in every installed header.
#define TESSERA_API_BEGIN _Pragma("GCC visibility push(default)")
/// Ends the exported declarations that TESSERA_API_BEGIN has begun.
#define TESSERA_API_END _Pragma("GCC visibility pop")

/// Like TESSERA_API_BEGIN, for headers that tests use but that are not installed.
#define TESSERA_API_FOR_TEST_BEGIN TESSERA_API_BEGIN
/// Ends the region that TESSERA_API_FOR_TEST_BEGIN has begun.
#define TESSERA_API_FOR_TEST_END TESSERA_API_END
