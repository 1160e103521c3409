// The numbers of the nodes of autograd's graph. Its engine runs the node with the highest number
// of those that are ready, so that a lower one runs late; and what nodes a forward made is told by
// two of them. at::RecordFunction says which number runs. There is no public way to ask for one.
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
