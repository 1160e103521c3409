#pragma once

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

/// How many data-parallel ranks shared the batch of this thread's last forward in training; 1
/// before any. What follows the model in the program, a loss above all, learns so that it has a
/// part.
std::int64_t batch_ranks();
void set_batch_ranks(std::int64_t ranks);

/// Whether this thread's program has ever used a function that turns a mean over ranks with
/// different numbers of rows into one over all rows.
bool weighs_ranks();
void note_weighing();

}  // namespace tessera::nn
TESSERA_API_END
