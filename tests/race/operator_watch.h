#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "race/checker.h"

namespace tessera::race {

/// Returns, for each tensor with storage, the memory from its first to its last element.
std::vector<Range> memory_of(const std::vector<at::Tensor>& tensors);

/// While an OperatorWatch exists, the operators of this thread are reported to the checker. An
/// operator's schema tells what the operator reads and writes. Views do neither.
class OperatorWatch {
 public:
  explicit OperatorWatch(RaceChecker& checker);
  OperatorWatch(const OperatorWatch&) = delete;
  OperatorWatch& operator=(const OperatorWatch&) = delete;
  ~OperatorWatch();

 private:
  std::uint64_t callback_;
};

/// While an OperatorPause exists, operators are not reported. The collectives of a CPU back end
/// call operators that a back end for GPUs does not call.
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
