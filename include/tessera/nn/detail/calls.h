#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn::detail {

/// A text that is added to the message of an error in a module's call, for example "unit
/// 'layers.0'". The layer that provides the text, such as FSDP, attaches a CallContext to the
/// module.
struct CallContext {
  std::function<std::string()> text;
};

}  // namespace tessera::nn::detail

namespace tessera::nn {

class ModuleBase;

namespace detail {

/// Number of nested module calls on this thread: 1 in the outermost call, 0 outside of calls.
int call_depth();
/// The module of this thread's outermost call; nullptr if no module call is in progress.
const ModuleBase* outermost_call();

}  // namespace detail

/// Number of data-parallel ranks that shared the batch of this thread's last training forward; 1
/// before the first training forward. Loss functions read this number to find out whether their
/// rows are only a part of the batch.
std::int64_t batch_ranks();
void set_batch_ranks(std::int64_t ranks);

/// Whether this thread has ever called a function that weights a mean over ranks by their numbers
/// of rows.
bool weighs_ranks();
void note_weighing();

/// The calls of a module around which a hook runs.
enum class HookedCalls : std::uint8_t {
  kForward,
  kEveryMethod,  ///< the hook runs around forward, and around other methods that
                 ///< Module::call_method calls
};

}  // namespace tessera::nn
TESSERA_API_END
