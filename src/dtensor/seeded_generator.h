#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <mutex>

#include "tessera/dtensor/random.h"

namespace tessera::detail {

/// The key of the next random operator of this thread's rank.
RandomKey next_random_key();

/// While it lives, the default generator of `device` draws the numbers of `key`. Ranks that are
/// threads of one process take turns.
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
