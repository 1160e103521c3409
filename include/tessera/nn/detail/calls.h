#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

/// Attached to a module by a higher layer: the context that an error of a call gets in its message,
/// for example "unit 'layers.0'".
struct CallContext {
  std::function<std::string()> text;
};

}  // namespace tessera::nn::detail

namespace tessera::nn {

class ModuleBase;

namespace detail {

/// How many calls of modules this thread is in, one inside another: 1 in the outermost.
int call_depth();
/// The module of the outermost; nullptr outside of calls.
const ModuleBase* outermost_call();

}  // namespace detail

/// How many data-parallel ranks shared the batch of this thread's last forward in training; 1
/// before the first. Losses read it, to know that they have a part of the batch.
std::int64_t batch_ranks();
void set_batch_ranks(std::int64_t ranks);

/// Whether this thread's program has ever used a function that turns a mean over ranks with
/// different numbers of rows into one over all rows.
bool weighs_ranks();
void note_weighing();

}  // namespace tessera::nn
TESSERA_API_END
