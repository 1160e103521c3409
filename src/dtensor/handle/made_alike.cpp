// Whether the ranks of a mesh have made the same tensor on it.

#include "handle/made_alike.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>
#include <exception>
#include <string>
#include <vector>

#include "agreement/agreement.h"
#include "rank/below_autograd.h"
#include "tensor/distributed_impl.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/trace.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/flush_pending_transfers.h"
#include "tessera/dtensor/random.h"

namespace tessera {
namespace {

/// What ranks must agree on: sizes, mesh, placements and type, as a text that a message can show.
std::string text_of(const DistributedTensor& tensor) {
  return detail::describe(*detail::as_distributed(tensor)->spec()) + " of " +
         c10::toString(tensor.tensor().scalar_type());
}

/// The world ranks of the mesh whose number is not that of its first one: "1, 3"; empty where all
/// agree. One number a rank is sent, whatever is compared: its hash. Collective.
std::string ranks_that_differ(const DeviceMesh& mesh, std::uint64_t number) {
  const comm::CallerScope caller("check_agreement");
  const detail::BelowAutograd guard;
  std::vector<int> others =
      comm::ranks_that_differ(flush_pending_transfers(mesh.group_of_all_ranks()), mesh.device(),
                              std::bit_cast<std::int64_t>(number));
  for (int& rank : others) {
    rank = mesh.ranks()[static_cast<std::size_t>(rank)];
  }
  return fmt::format("{}", fmt::join(others, ", "));
}

/// Throws unless every rank of the mesh says the same of a tensor. Collective.
void compare(const DeviceMesh& mesh, const std::string& text) {
  const auto others = ranks_that_differ(mesh, stream_of(text.c_str()));
  TESSERA_CHECK(others.empty(), "the ranks of ", to_string(mesh), " disagree on a tensor: on rank ",
                mesh.world()->rank(), " it is ", text, "; different from rank ", mesh.ranks()[0],
                " are ranks ", others, ": give the same sizes, type and placements everywhere");
}

}  // namespace

// A rank that could not make the tensor still compares, with a text that no tensor has. The others
// find that they differ and throw, and its caller gets its own error.
DistributedTensor detail::make_agreed(const DeviceMesh& mesh,
                                      const std::function<DistributedTensor()>& make) {
  if (!checks_agreement()) {
    return make();
  }
  DistributedTensor made;
  std::exception_ptr error;
  try {
    made = make();
  } catch (...) {
    error = std::current_exception();
  }
  try {
    compare(mesh, error ? "nothing: it failed" : text_of(made));
  } catch (...) {
    if (!error) {
      throw;
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
  return made;
}

void check_agreement(const DistributedTensor& tensor) {
  compare(tensor.mesh(), text_of(tensor));
}

}  // namespace tessera
