#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/strict_scope.h"
#include "testing/errors.h"
#include "testing/ranks.h"
#include "testing/values.h"

namespace tessera::testing {

/// A function with a name, for tables of test cases.
template <class Signature>
struct Named {
  const char* name;
  std::function<Signature> run;
};

}  // namespace tessera::testing
