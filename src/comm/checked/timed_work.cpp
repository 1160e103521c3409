// The times of a collective, for recorders.

#include "checked/timed_work.h"

#include <functional>
#include <memory>
#include <utility>

#include "backends.h"

namespace tessera::comm {
namespace {

/// If it is waited for several times, only the first wait may take time.
class TimedWork final : public Work {
 public:
  TimedWork(WorkPtr inner, TrafficCounterPtr traffic, CollectiveCallPtr call)
      : inner_(std::move(inner)), traffic_(std::move(traffic)), call_(std::move(call)) {}

  void wait() override {
    const CollectiveCallPtr call = std::exchange(call_, nullptr);
    if (call == nullptr) {
      inner_->wait();
      return;
    }
    traffic_->note(*call, &CollectiveCall::wait_began);
    inner_->wait();
    traffic_->note(*call, &CollectiveCall::wait_ended);
  }

  std::function<bool()> device_progress() override { return inner_->device_progress(); }

 private:
  WorkPtr inner_;
  TrafficCounterPtr traffic_;
  CollectiveCallPtr call_;  ///< nullptr: it has been waited for
};

}  // namespace

WorkPtr timed(const TrafficCounterPtr& traffic, const CollectiveCallPtr& call, WorkPtr work) {
  if (call == nullptr) {
    return work;
  }
  traffic->note(*call, &CollectiveCall::returned);
  if (work != done_work()) {
    return std::make_shared<TimedWork>(std::move(work), traffic, call);
  }
  return work;
}

}  // namespace tessera::comm
