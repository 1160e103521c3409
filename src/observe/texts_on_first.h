#pragma once

#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera::observe {

/// The text of each rank of a group of the hosts, on its rank 0; none on the others, which so need
/// no memory for them. Collective.
std::vector<std::string> texts_on_first(comm::Communicator& hosts, const std::string& own);

}  // namespace tessera::observe
