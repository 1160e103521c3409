#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "race/checker.h"

namespace tessera::race {

/// The memory between a tensor's first and last element; empty without storage.
std::vector<Range> memory_of(const std::vector<at::Tensor>& tensors);

/// While it exists, the operators of this thread tell the checker what they read and write, by
/// their schemas. Views read and write nothing.
class OperatorWatch {
 public:
  explicit OperatorWatch(RaceChecker& checker);
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;
  ~OperatorWatch();

 private:
  std::uint64_t callback_;
};

/// While it exists, operators are not reported: the operators of a CPU back end do not run on a
/// device's lanes.
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
