#include "tessera/internals/detail/tensor_wrapper.h"

#include <c10/core/AutogradState.h>

namespace tessera::detail {

void replay_views() {
  c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
}

}  // namespace tessera::detail
