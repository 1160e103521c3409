#include "call_agreement.h"

#include <algorithm>
#include <string>

#include "tessera/core/error.h"

namespace tessera::fsdp {
namespace {

using Groups = std::vector<comm::Communicator*>;

/// Each once, after those that are in `order` already.
void append_by_size(Groups& order, Groups groups) {
  std::ranges::stable_sort(groups, {}, &comm::Communicator::size);
  for (comm::Communicator* group : groups) {
    if (std::ranges::find(order, group) == order.end()) {
      order.push_back(group);
    }
  }
}

}  // namespace

void agree_on_calls(const Groups& sharding, const Groups& replicating) {
  Groups groups;
  append_by_size(groups, sharding);
  append_by_size(groups, replicating);
  std::string trouble;
  for (comm::Communicator* group : groups) {
    try {
      group->agree_on_calls(trouble);
    } catch (const comm::PeerError&) {
      if (trouble.empty()) {
        throw;
      }
      break;
    } catch (const Error& error) {
      if (trouble.empty()) {
        trouble = error.what();
      }
    }
  }
  TESSERA_CHECK(trouble.empty(), trouble, kHintOfUnusedUnits);
}

}  // namespace tessera::fsdp
