#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "race/checker.h"

namespace tessera::race {

/// Returns the memory between each tensor's first and last element. Skips tensors without storage.
std::vector<Range> memory_of(const std::vector<at::Tensor>& tensors);

/// While the object exists, reports to the checker what each operator of this thread reads and
/// writes, according to its schema. Views read and write nothing.
class OperatorWatch {
 public:
  explicit OperatorWatch(RaceChecker& checker);
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;
  ~OperatorWatch();

 private:
  std::uint64_t callback_;
};

/// While the object exists, the checker gets no reports of operators. A CPU back end calls
/// operators that a back end for a device does not call.
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
