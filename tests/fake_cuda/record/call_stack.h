// The stack of a call, cheap to take and slow to print.
#pragma once

#include <string>
#include <vector>

namespace fake_cuda {

/// Return addresses, innermost first, without those of the fake itself.
using CallStack = std::vector<void*>;

CallStack take_stack();

/// A line a frame: the demangled function or, where its library keeps no name, library+offset.
std::vector<std::string> describe(const CallStack& stack);

/// What c++filt would print; the name itself if it is not a mangled one.
std::string demangle(const char* name);

}  // namespace fake_cuda
