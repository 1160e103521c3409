// What a library exports. Sources are compiled with hidden visibility: declarations of a header
// between these lines are exported, those only in a source are not.
#pragma once

/// Exports one declaration.
#define TESSERA_API __attribute__((visibility("default")))

// Pragmas, for a namespace's attribute does not do: g++ refuses it where the namespace is nested,
// and clang does not carry it to functions.

/// Exports what is declared up to TESSERA_API_END: in every installed header.
#define TESSERA_API_BEGIN _Pragma("GCC visibility push(default)")
/// Ends what TESSERA_API_BEGIN has begun.
#define TESSERA_API_END _Pragma("GCC visibility pop")

/// As TESSERA_API_BEGIN, in headers that are not installed, for the tests.
#define TESSERA_API_FOR_TEST_BEGIN TESSERA_API_BEGIN
/// Ends what TESSERA_API_FOR_TEST_BEGIN has begun.
#define TESSERA_API_FOR_TEST_END TESSERA_API_END
