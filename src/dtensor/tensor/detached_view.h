#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "tessera/core/layout.h"

namespace tessera::detail {

/// The state of a view whose base had to be redistributed to take it. The view holds a copy of the
/// viewed values, not an alias. It may be read as long as the base has not been written since; a
/// write to the view is repeated on the base.
struct DetachedView {
  /// How to take the view again from the base's local tensor once the base has `layout`.
  struct Replay {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments;  ///< with local tensors
    std::size_t base;                    ///< which of them is the base
    std::size_t result;                  ///< which of the results, lists flattened, is the view
    LayoutPtr layout;
    /// The strides that the base must have, where the operator runs without a rule.
    std::optional<std::vector<std::int64_t>> strides;
  };

  /// The base's state when the view was taken or last written. The pieces of one split share it,
  /// since they do not overlap: a write to one of them leaves the others valid.
  struct Seen {
    /// nullopt where the base is an inference tensor, which has no version: it must not be written
    /// then.
    std::optional<std::uint32_t> version;
    bool written = false;  ///< by a view, whose own version bump then comes on top
  };

  at::Tensor base;
  std::shared_ptr<Seen> seen;
  /// nullptr: shares memory with `base`, which is a detached view itself.
  std::shared_ptr<Replay> replay{};

  bool is_stale() const;
  /// The view was written, and its base with it.
  void note_write();
};
using DetachedViewPtr = std::shared_ptr<DetachedView>;

/// The current state of a view of `base`, a distributed tensor.
DetachedViewPtr detached_view_of(const at::Tensor& base);

class DistributedTensorImpl;

/// Throws Error if `impl` is a detached view whose base was written since. `what`: the caller, for
/// the message.
void check_readable(const DistributedTensorImpl& impl, std::string_view what);
/// The state of `impl`, a detached view, after its sizes are changed in place: a view of what it
/// was before, with which it shares memory.
DetachedViewPtr view_of_former(const DistributedTensorImpl& impl);

}  // namespace tessera::detail
