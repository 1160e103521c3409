#pragma once

#include <string>
#include <utility>

#include "tessera/comm/communicator.h"
#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

/// Sets the purpose of a group's calls for the duration of the scope (Communicator::set_purpose).
class PurposeScope : tessera::detail::NoCopy {
 public:
  PurposeScope(Communicator& group, std::string purpose) : group_(group) {
    group_.set_purpose(std::move(purpose));
  }
  ~PurposeScope() { group_.set_purpose({}); }

 private:
  Communicator& group_;
};

}  // namespace tessera::comm
TESSERA_API_END
