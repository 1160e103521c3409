// Memory for packed collectives, passed from unit to unit. libtorch's caching allocator would serve
// the same sizes, but with an unbounded cache for each stream; here memory that does not fit the
// next request is freed at once. On a CPU events are null, and waiting for one does nothing.

#include "memory/buffer_pool.h"

#include <ATen/ops/empty.h>

#include <numeric>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::fsdp {
namespace {

/// A buffer may be this much larger than what is asked for.
// Twice: units of one model differ little, and a much larger buffer is better freed.
constexpr std::int64_t kWaste = 2;

}  // namespace

at::Tensor MemorySource::allocate(std::int64_t numel, const c10::TensorOptions& options) const {
  if (function == nullptr) {
    return group != nullptr ? group->allocate(numel, options) : at::empty({numel}, options);
  }
  at::Tensor tensor = (*function)(*group, numel, options);
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  // A tensor of another shape would be an error far from here, inside of the collective.
  const bool fits = tensor.defined() && tensor.sizes() == at::IntArrayRef(numel) &&
                    tensor.is_contiguous() && tensor.scalar_type() == dtype &&
                    tensor.device().type() == options.device().type();
  TESSERA_CHECK(fits, "the allocator of a custom collective returned ",
                tensor.defined() ? detail::concat("a tensor of sizes ", tensor.sizes(), ", ",
                                                  tensor.scalar_type(), " on ", tensor.device())
                                 : "no tensor",
                "; return a flat tensor of ", numel, " contiguous elements, ", dtype, " on ",
                options.device());
  return tensor;
}

BufferPool::Buffer BufferPool::acquire(std::int64_t numel, c10::ScalarType dtype, comm::Lane lane,
                                       const MemorySource& source) {
  const std::int64_t bytes = numel * static_cast<std::int64_t>(c10::elementSize(dtype));
  at::Tensor memory;
  if (const auto found = best_fit(bytes, lane, source); found != idle_.end()) {
    // The last user may still be reading, in another lane.
    streams_->wait(lane, found->event);
    memory = std::move(found->bytes);
    idle_.erase(found);
  } else {
    // Memory that did not fit is freed first: idle and new memory together would add to the peak.
    drop(lane);
    memory = source.allocate(numel, at::dtype(dtype).device(device_)).view(at::kByte);
  }
  // As bytes, so that one buffer serves types of any size.
  at::Tensor tensor = memory.narrow(0, 0, bytes).view(dtype);
  return {std::move(tensor), std::move(memory), lane, source};
}

std::vector<BufferPool::Idle>::iterator BufferPool::best_fit(std::int64_t bytes, comm::Lane lane,
                                                             const MemorySource& source) {
  auto best = idle_.end();
  for (auto idle = idle_.begin(); idle != idle_.end(); ++idle) {
    const std::int64_t room = idle->bytes.numel();
    const bool same = idle->lane == lane && idle->source == source;
    // Memory belongs to the lane that allocated it.
    const bool fits = same && room >= bytes && room <= kWaste * bytes;
    if (fits && (best == idle_.end() || room < best->bytes.numel())) {
      best = idle;
    }
  }
  return best;
}

void BufferPool::release(Buffer buffer, comm::StreamEventPtr event) {
  idle_.push_back(
      {std::move(buffer.bytes), buffer.lane, std::move(buffer.source), std::move(event)});
}

void BufferPool::drop(comm::Lane lane) {
  std::erase_if(idle_, [&](const Idle& idle) {
    if (idle.lane != lane) {
      return false;
    }
    // The lane may reuse freed memory at once, so it must have waited.
    streams_->wait(lane, idle.event);
    return true;
  });
}

void BufferPool::clear() {
  for (const comm::Lane lane :
       {comm::Lane::kCompute, comm::Lane::kAllGather, comm::Lane::kReduceScatter}) {
    drop(lane);
  }
}

std::int64_t BufferPool::idle_bytes() const {
  return std::accumulate(
      idle_.begin(), idle_.end(), std::int64_t{0},
      [](std::int64_t sum, const Idle& idle) { return sum + idle.bytes.numel(); });
}

}  // namespace tessera::fsdp
