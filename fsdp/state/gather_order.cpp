// Positions, not successors: a unit may run more than once in a forward.

#include "state/gather_order.h"

#include <algorithm>
#include <utility>

namespace tessera::fsdp {

void GatherOrder::begin() {
  running_.clear();
  gathered_.clear();
  follows_ = true;
}

void GatherOrder::gathered(const std::shared_ptr<Unit>& unit) {
  gathered_.push_back(unit);
}

bool GatherOrder::used(const std::shared_ptr<Unit>& unit) {
  if (std::ranges::none_of(gathered_, [&](const auto& each) { return each.lock() == unit; })) {
    return false;
  }
  follows_ = next() == unit;
  running_.push_back(unit);
  return true;
}

std::shared_ptr<Unit> GatherOrder::next() const {
  const bool known = follows_ && running_.size() < last_.size();
  return known ? last_[running_.size()].lock() : nullptr;
}

/// Units that stay unsharded between micro-batches are gathered in the first of them.
void GatherOrder::end() {
  if (!running_.empty()) {
    last_ = std::exchange(running_, {});
  }
  follows_ = false;
}

}  // namespace tessera::fsdp
