#include "tessera/training/same_options.h"

#include <nlohmann/json.hpp>
#include <vector>

#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/ranks_of_world.h"
#include "tessera/core/error.h"

namespace tessera::training {

namespace {

std::string given(const std::string& name, const std::string& value) {
  return value.empty() ? "no " + name : name + " " + value;
}

}  // namespace

void check_same_options(comm::World& world, const std::map<std::string, std::string>& own) {
  using nlohmann::json;
  const comm::CommunicatorPtr group = world.host_group(comm::ranks_of_world(world.size()), "start");
  const std::vector<std::string> texts = comm::texts_that_differ(
      *group, json(own).dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace));
  if (texts.empty()) {
    return;
  }
  const json first = json::parse(texts[0]);
  for (std::size_t rank = 1; rank < texts.size(); ++rank) {
    const json second = json::parse(texts[rank]);
    json all = first;
    all.update(second);
    for (const auto& [name, unused] : all.items()) {
      const std::string value = first.value(name, ""), theirs = second.value(name, "");
      TESSERA_CHECK(value == theirs, "rank ", rank, " has ", given(name, theirs),
                    ", but rank 0 has ", given(name, value),
                    "; start all ranks with the same options");
    }
  }
}

}  // namespace tessera::training
