// A program that uses `tessera::core` alone, built in a project that adds Tessera's sources.
#include <iostream>

#include "tessera/core/placement.h"
#include "tessera/version.h"

int main() {
  const bool right = tessera::parse_placement("Shard(1)") == tessera::Placement(tessera::Shard{1});
  std::cout << "tessera " << TESSERA_VERSION << (right ? "\n" : ": a placement was read wrongly\n");
  return right ? 0 : 1;
}
