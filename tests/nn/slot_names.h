#pragma once

#include <string>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::testing {

inline std::vector<std::string> names_of(const nn::NamedSlots& slots) {
  std::vector<std::string> names;
  for (const auto& [name, slot] : slots) {
    names.push_back(name);
  }
  return names;
}

}  // namespace tessera::testing
