#include "tessera/core/end_program.h"

#include <algorithm>
#include <cstdlib>
#include <iostream>

namespace tessera {

/// One write for the whole line: lines of several ranks must not mix.
void end_program(const std::string& who, std::string message) {
  message.resize(std::min(message.find("\nException raised from "), message.size()));
  std::ranges::replace(message, '\n', ' ');
  std::cout << std::flush;
  std::cerr << who + ": " + message + "\n" << std::flush;
  std::_Exit(1);
}

}  // namespace tessera
