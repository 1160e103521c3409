// The numbers of the nodes of autograd's graph. Its engine runs the ready node with the highest
// number first. Two numbers tell which nodes a forward has made. at::RecordFunction says which
// number runs. There is no public way to ask for one.
//
// No version differs.
//
// Canary: SequenceNumberCanary.
#pragma once

#include <ATen/SequenceNumber.h>

#include <cstdint>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// The number of the node that this thread makes next.
inline std::uint64_t next_sequence_number() {
  return at::sequence_number::peek();
}
/// The same, which no node gets then but one that is made with it.
inline std::uint64_t take_sequence_number() {
  return at::sequence_number::get_and_increment();
}

}  // namespace tessera::detail
TESSERA_API_END
