#pragma once

#include <string>

#include "group_info.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d_store.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// Returns when all ranks of a group have called it. `store` is of this meeting alone. A set-up
/// waits for all ranks until the time-out, whatever has become of them: so it is begun only when
/// they are there. Throws PeerError as PeerWait does.
void meet(detail::Store& store, const GroupInfo& group);

/// Whether groups that have all ranks of a world between them make this call within two seconds,
/// each group with all its ranks. All of them get one answer, whenever they come. `world` is the
/// store of all ranks, `own` that of this call of this group alone. `meeting`: the name under which
/// groups come together in `world`. That of the group's first rank counts, for ranks may not agree:
/// each counts the groups that it was in. Throws PeerError as PeerWait does.
bool all_come_at_once(detail::Store& world, detail::Store& own, const GroupInfo& group,
                      int world_size, const std::string& meeting);

/// The value of a key that the rank `from` of the group sets. Throws PeerError as PeerWait does.
std::string value_from(detail::Store& store, const GroupInfo& group, int from,
                       const std::string& key);

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
