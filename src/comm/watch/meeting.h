#pragma once

#include <string>

#include "group_info.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// Returns when all ranks of a group have called it. `store` is this meeting's alone. A set-up
/// waits for all ranks until the time-out, even if one is dead: so it begins only after this
/// returns. Throws PeerError as PeerWait does.
void meet(const detail::StorePtr& store, const GroupInfo& group);

/// Whether groups that together have all ranks of a world make this call within two seconds, each
/// group with all its ranks. All of them get one answer, whenever they come. `world`: the store of
/// all ranks. `own`: the store of this call of this group. `meeting`: the name under which groups
/// meet in `world`. The first rank's name counts for its group, since ranks may disagree: each
/// counts the groups that it was in. Throws PeerError as PeerWait does.
bool all_come_at_once(const detail::StorePtr& world, const detail::StorePtr& own,
                      const GroupInfo& group, int world_size, const std::string& meeting);

/// Sets a key. Throws PeerError as PeerWait does.
void tell(const detail::StorePtr& store, const GroupInfo& group, const std::string& key,
          const std::string& value);

/// The value of a key that the rank `from` of the group sets. Throws PeerError as PeerWait does.
std::string value_from(const detail::StorePtr& store, const GroupInfo& group, int from,
                       const std::string& key);

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
