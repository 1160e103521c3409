// The state of a view that holds a copy, because its base had to be gathered for it, and the check
// that it is not read after its base was written. views/view_writes.cpp repeats writes to the view
// on the base. execute/wrap_results.cpp makes these views.

#include "tensor/detached_view.h"

#include "tensor/distributed_impl.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {
namespace {

/// nullopt for an inference tensor, which has no version counter.
std::optional<std::uint32_t> version_of(const at::Tensor& tensor) {
  if (tensor.is_inference()) {
    return std::nullopt;
  }
  return writes_of(tensor);
}

}  // namespace

bool DetachedView::is_stale() const {
  if (!seen->version) {
    return false;
  }
  // A write through the view bumps the version of the view as well. Where the two share a counter,
  // as views of one tensor do, that comes on top of the version that write_through noted.
  const auto now = version_of(base);
  return now != seen->version && !(seen->written && now == *seen->version + 1);
}

void DetachedView::note_write() {
  *seen = {version_of(base), /*written=*/true};
}

DetachedViewPtr detached_view_of(const at::Tensor& base) {
  return std::make_shared<DetachedView>(DetachedView{
      .base = base,
      .seen = std::make_shared<DetachedView::Seen>(DetachedView::Seen{version_of(base)})});
}

void check_readable(const DistributedTensorImpl& impl, std::string_view what) {
  TESSERA_CHECK(!impl.detached_view() || !impl.detached_view()->is_stale(), what,
                " uses a view that had to be gathered, after the viewed tensor was written: "
                "take the view again");
}

DetachedViewPtr view_of_former(const DistributedTensorImpl& impl) {
  auto& view = *impl.detached_view();
  view.seen->version = version_of(view.base);
  auto result = detached_view_of(alias_tensor(impl, /*allows_change=*/true));
  // The change of sizes bumps the version of both, which must not make them stale.
  view.seen->written = result->seen->written = true;
  return result;
}

}  // namespace tessera::detail
