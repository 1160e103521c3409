#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <mutex>

#include "tessera/dtensor/random.h"

namespace tessera::detail {

/// The key of the next random operator of this rank. Each call counts: ranks stay in step
/// by making the same calls.
RandomKey next_random_key();

/// For random operators that are gathered (CallPlan::seeded): all ranks run the whole one and must
/// draw the same. While it lives, the default generator of `device` draws the numbers of `key`.
/// Ranks that are threads of one process take turns.
class SeededGenerator {
 public:
  SeededGenerator(c10::Device device, RandomKey key);
  ~SeededGenerator();
  SeededGenerator(const SeededGenerator&) = delete;
  SeededGenerator& operator=(const SeededGenerator&) = delete;

 private:
  std::unique_lock<std::mutex> turn_;
  at::Generator generator_;
  at::Tensor outer_;
};

}  // namespace tessera::detail
