#include <c10/core/Device.h>

#include "all_ranks.h"
#include "step/objects.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/trace.h"
#include "tessera/comm/world.h"

namespace tessera::checkpoint {

using nlohmann::json;

json get_rank_state_dict(comm::World& world, const NamedRankStates& objects,
                         const StateDictOptions& options) {
  const comm::CallerScope caller("get_rank_state_dict");
  json own;
  run_or_fail_on_all(world, [&] { own = own_rank_states(objects); });
  if (!options.full_state_dict) {
    return own;
  }
  const json lists = rank_state_lists(
      comm::gather_texts(*all_ranks(world), c10::Device(world.options().device), own.dump()));
  json states = json::object();
  run_or_fail_on_all(world, [&] {
    for (const auto& [name, object] : objects) {
      if (lists.contains(name) && (world.rank() == 0 || !options.cpu_offload)) {
        states[name] = object->merged(lists.at(name).get<std::vector<json>>());
      }
    }
  });
  return states;
}

void set_rank_state_dict(comm::World& world, const NamedRankStates& objects, const json& states,
                         const StateDictOptions& options) {
  const comm::CallerScope caller("set_rank_state_dict");
  json lists = json::object();
  for (const auto& [name, state] : states.items()) {
    lists[name] = json::array({state});
  }
  run_or_fail_on_all(world, [&] {
    if (options.full_state_dict && world.rank() > 0) {
      load_rank_states(json::object(), objects, {}, world.rank(), world.size());
    } else {
      load_rank_states(lists, objects, {}, /*rank=*/0, /*world_size=*/1);
    }
  });
}

}  // namespace tessera::checkpoint
