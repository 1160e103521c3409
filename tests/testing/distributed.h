#pragma once

// The headers that most tests of distributed tensors use.
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

/// A named function: a row of a table of tests.
template <class Signature>
struct Named {
  const char* name;
  std::function<Signature> run;
};

}  // namespace tessera::testing
