#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "fuzz/case.h"
#include "testing/ranks.h"

namespace tessera::fuzz {

/// What a rank has seen of a training run.
struct Trace {
  std::vector<double> losses;      ///< its part's: their mean over the parts is the loss
  std::vector<double> grad_norms;  ///< one a step
  std::map<std::string, at::Tensor> parameters;  ///< whole, after the last step
  int steps = 0;                                 ///< that have ended
};

/// Trains on this rank alone, on the whole batch. `flips`: of how weights begin, about half of the
/// last bits are flipped, others with each number; 0: none.
void train_alone(const Case& c, Trace& trace, std::uint64_t flips = 0);
/// Trains as one of the ranks of the case's mesh.
void train_distributed(const Case& c, const testing::Rank& rank, Trace& trace);

}  // namespace tessera::fuzz
