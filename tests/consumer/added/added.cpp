// A program that links only tessera::core, built in a CMake project that adds Tessera's sources.
#include <iostream>

#include "tessera/core/placement.h"
#include "tessera/version.h"

int main() {
  const bool right = tessera::parse_placement("Shard(1)") == tessera::Placement(tessera::Shard{1});
  std::cout << "tessera " << TESSERA_VERSION << (right ? "\n" : ": a placement was read wrongly\n");
  return right ? 0 : 1;
}
