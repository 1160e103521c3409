#pragma once

#include "race/checker/race_checker.h"
#include "tessera/comm/world.h"

namespace tessera::race {

/// A rank's world whose collectives tell a checker what they read and write, from their call until
/// they are waited for. The checker must outlive it.
comm::WorldPtr checked_world(const comm::WorldPtr& world, RaceChecker& checker);

}  // namespace tessera::race
