#include "gloo/lazy_host_group.h"

namespace tessera::comm {

Communicator& LazyHostGroup::get() {
  if (failed_) {
    throw PeerError(
        "the group over which the hosts agree failed earlier; look for the first error");
  }
  if (made_ == nullptr) {
    // Without the lock: this may take as long as the time-out, and abort() must not wait for it.
    CommunicatorPtr made;
    try {
      made = make_();
    } catch (const PeerError&) {
      failed_ = true;
      throw;
    }
    const std::lock_guard lock(mutex_);
    made_ = std::move(made);
    if (failed_) {  // aborted in between
      made_->abort();
    }
  }
  return *made_;
}

void LazyHostGroup::abort() {
  failed_ = true;
  const std::lock_guard lock(mutex_);
  if (made_ != nullptr) {
    made_->abort();
  }
}

}  // namespace tessera::comm
