#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "race/checker.h"

namespace tessera::race {

/// Returns, for each tensor that has a storage, the memory from its first to its last element.
std::vector<Range> memory_of(const std::vector<at::Tensor>& tensors);

/// While an OperatorWatch exists, the checker records this thread's operators. Schemas tell which
/// arguments are read and written. Views are neither reads nor writes.
class OperatorWatch {
 public:
  explicit OperatorWatch(RaceChecker& checker);
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;
  ~OperatorWatch();

 private:
  std::uint64_t callback_;
};

/// While an OperatorPause exists, operators are not recorded. Used for CPU collectives, which call
/// operators that GPU collectives do not call.
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
