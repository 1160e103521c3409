#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/dtensor/operator_mode.h"

namespace tessera {

struct ListingMode : OperatorMode {
  Results call(const Operator& op, const std::function<Results()>& run) override {
    names.push_back(op.name);
    return run();
  }
  std::vector<std::string> names;
};

}  // namespace tessera
