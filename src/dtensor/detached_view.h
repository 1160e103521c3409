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

/// What a view remembers whose base had to be redistributed: it holds a copy of what it views. It
/// may be read as long as the base has not been written since; what is written to it is written to
/// the base as well.
struct DetachedView {
  /// How the view is taken of the base's local tensor once the base lies as `layout`.
  struct Replay {
    c10::OperatorHandle op;
    std::vector<c10::IValue> arguments;  ///< local ones
    std::size_t base;                    ///< which of them is the base
    std::size_t result;                  ///< which of the results, lists flattened, is the view
    LayoutPtr layout;
    /// The strides that the operator needs of the base, where it runs without a rule.
    std::optional<std::vector<std::int64_t>> strides;
  };

  at::Tensor base;
  /// None where the base is an inference tensor, which counts none: it is not written to then.
  std::optional<std::uint32_t> base_version;
  bool written = false;              ///< through this view, which bumps the version once more
  std::shared_ptr<Replay> replay{};  ///< none: shares memory with `base`, a detached view itself

  bool is_stale() const;
};
using DetachedViewPtr = std::shared_ptr<DetachedView>;

/// A view of `base`, a distributed tensor, as it is now.
DetachedViewPtr detached_view_of(const at::Tensor& base);

class DistributedTensorImpl;

/// Throws Error if `impl` is a detached view whose base was written since. `what` asks for it.
void check_readable(const DistributedTensorImpl& impl, std::string_view what);
/// Throws Error if `impl`, a detached view, may not be written.
void check_writable(const DistributedTensorImpl& impl, std::string_view what);

/// What `impl`, a detached view, is once it gets other sizes in place: a view, sharing its memory,
/// of what it was.
DetachedViewPtr view_of_former(const DistributedTensorImpl& impl);

/// Carries what was written to `view`, a distributed tensor that is a detached view, on to its
/// base, and from there on if that is one too. Collective: the base is gathered and sliced again.
void write_through(const at::Tensor& view);

}  // namespace tessera::detail
