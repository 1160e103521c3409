#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "race/checker.h"

namespace tessera::race {

/// Returns the memory between each tensor's first and last element. Skips tensors without storage.
std::vector<Range> memory_of(const std::vector<at::Tensor>& tensors);

/// While the object exists, reports what the operators of this thread read and write, derived from
/// their schemas, to the checker. Views read and write nothing.
class OperatorWatch {
 public:
  explicit OperatorWatch(RaceChecker& checker);
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;
  ~OperatorWatch();

 private:
  std::uint64_t callback_;
};

/// While the object exists, operators are not reported. Used for operators inside a CPU back end,
/// which do not run on a device's lanes.
class OperatorPause {
 public:
  OperatorPause();
  OperatorPause(const OperatorPause&) = delete;
  OperatorPause& operator=(const OperatorPause&) = delete;
  ~OperatorPause();

 private:
  RaceChecker* outer_;
};

}  // namespace tessera::race
