#include "lazy_host_group.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr auto kArrivedKey = "arrived";
constexpr auto kAllHereKey = "all here";
constexpr auto kAbortedKey = "aborted";
constexpr milliseconds kLongestNap{200};

}  // namespace

/// A group's set-up waits for all ranks until the time-out, whatever has become of them; so it is
/// begun only when they are there.
void LazyHostGroup::await_peers() {
  if (store_->add(kArrivedKey, 1) == group_.size()) {
    store_->set(kAllHereKey, "");
  }
  const auto deadline = steady_clock::now() + group_.timeout;
  for (milliseconds nap{1}; !store_->check({kAllHereKey}); nap = std::min(2 * nap, kLongestNap)) {
    if (store_->check({kAbortedKey})) {
      fail("rank ", store_->get_to_str(kAbortedKey), " failed elsewhere");
    }
    TESSERA_CHECK(steady_clock::now() < deadline, "a peer did not come within ",
                  group_.timeout.count(), " ms");
    std::this_thread::sleep_for(nap);
  }
}

Communicator& LazyHostGroup::get() {
  try {
    TESSERA_CHECK(!failed_, "the group failed earlier");
    if (made_ == nullptr) {
      await_peers();
      CommunicatorPtr made = make_();
      const std::lock_guard lock(mutex_);
      made_ = std::move(made);
      if (failed_) {  // aborted in between
        made_->abort();
      }
    }
  } catch (const std::exception& error) {
    failed_ = true;
    throw PeerError(describe(group_, "meeting") + ": " + first_line(error.what()) +
                    "; look for the first error among the other ranks");
  }
  return *made_;
}

void LazyHostGroup::abort() {
  failed_ = true;
  try {
    store_->set(kAbortedKey, std::to_string(group_.ranks[static_cast<std::size_t>(group_.rank)]));
  } catch (const std::exception&) {
    // The store's host is gone, and with it the job: the peers notice by themselves.
  }
  const std::lock_guard lock(mutex_);
  if (made_ != nullptr) {
    made_->abort();
  }
}

}  // namespace tessera::comm
