#pragma once

#include <cstdint>

namespace tessera::nn {

/// How many data-parallel ranks shared the batch of this thread's last forward in training; 1
/// before any. What follows the model in the program, a loss above all, learns so that it has a
/// part.
std::int64_t batch_ranks();
void set_batch_ranks(std::int64_t ranks);

}  // namespace tessera::nn
