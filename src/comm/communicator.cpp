#include "tessera/comm/communicator.h"

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

[[noreturn]] void unsupported(const Communicator& communicator, const char* collective) {
  fail(collective, " is not implemented by the communicator '", communicator.name(),
       "'; choose another backend in WorldOptions");
}

}  // namespace

WorkPtr Communicator::all_gather(const at::Tensor&, const at::Tensor&) {
  unsupported(*this, "all_gather");
}

WorkPtr Communicator::all_reduce(const at::Tensor&, ReduceOp) {
  unsupported(*this, "all_reduce");
}

WorkPtr Communicator::reduce_scatter(const at::Tensor&, const at::Tensor&, ReduceOp) {
  unsupported(*this, "reduce_scatter");
}

WorkPtr Communicator::all_to_all(const at::Tensor&, const at::Tensor&,
                                 std::span<const std::int64_t>, std::span<const std::int64_t>) {
  unsupported(*this, "all_to_all");
}

WorkPtr Communicator::broadcast(const at::Tensor&, int) {
  unsupported(*this, "broadcast");
}

void Communicator::barrier() {
  unsupported(*this, "barrier");
}

}  // namespace tessera::comm
