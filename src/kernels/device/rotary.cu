// Rotary position embedding on a GPU: a block takes several positions where their heads are few.
#include <algorithm>
#include <iterator>

#include "device/launch_sizes.h"
#include "device/launches.h"

namespace tessera::kernels {
namespace {

template <class T, int N>
__global__ void __launch_bounds__(kThreads) rotary_kernel(Rotary call) {
  const std::int64_t positions = call.batch * call.sequence;
  for (std::int64_t position = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
       position < positions; position += static_cast<std::int64_t>(gridDim.x) * blockDim.y) {
    rotate_position<T, N>(call, position, static_cast<int>(threadIdx.x),
                          static_cast<int>(blockDim.x));
  }
}

bool are_aligned(const void* data, const HeadStrides& s, Element type) {
  const std::int64_t all = s.batch | s.position | s.group | s.head;
  return is_aligned(data, 2, all, type);
}

/// Both halves of every head, and of the tables, where N elements are more than one.
bool halves_are_aligned(const Rotary& call, Element type) {
  return call.half * bytes_of(type) % kVectorBytes == 0 && is_aligned(call.cos, 1, 0, type) &&
         is_aligned(call.sin, 1, 0, type) &&
         std::all_of(std::begin(call.parts), std::end(call.parts), [&](const RotaryHeads& part) {
           return part.heads == 0 ||
                  (are_aligned(part.x, part.from, type) && are_aligned(part.out, part.to, type));
         });
}

}  // namespace

void launch(const Rotary& call, Element type, cudaStream_t stream) {
  with_vectors(type, halves_are_aligned(call, type), [&]<class T, int N>() {
    const std::int64_t items = divide_up(call.half, N) * heads_of_position(call);
    unsigned of_position = 1;
    while (of_position < kThreads && of_position < items) {
      of_position *= 2;
    }
    const dim3 block(of_position, kThreads / of_position);
    const std::int64_t blocks = divide_up(call.batch * call.sequence, block.y);
    const auto grid = static_cast<unsigned>(std::min<std::int64_t>(blocks, 1 << 30));
    rotary_kernel<T, N><<<grid, block, 0, stream>>>(call);
  });
}

}  // namespace tessera::kernels
