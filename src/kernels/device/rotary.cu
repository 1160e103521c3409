// Rotary position embedding on a GPU: a thread processes one vector in several heads of a position,
// and a block processes several positions if each position has few heads.
#include <algorithm>
#include <iterator>

#include "device/launch_sizes.h"
#include "device/launches.h"

namespace tessera::kernels {
namespace {

template <class T, int N>
__global__ void __launch_bounds__(kThreads) rotary_kernel(const __grid_constant__ Rotary call) {
  const std::int64_t positions = call.batch * call.sequence;
  const RotaryShare share{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                          static_cast<int>(threadIdx.y), static_cast<int>(blockDim.y)};
  for (std::int64_t position = static_cast<std::int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
       position < positions; position += static_cast<std::int64_t>(gridDim.x) * blockDim.z) {
    rotate_position<T, N>(call, position, share);
  }
}

bool are_aligned(const void* data, const HeadStrides& s, Element type) {
  const std::int64_t all = s.batch | s.position | s.head;
  return is_aligned(data, 2, all, type);
}

/// Whether both halves of every head, and of the tables, are aligned for vector accesses.
bool halves_are_aligned(const Rotary& call, Element type) {
  return call.half * bytes_of(type) % kVectorBytes == 0 && is_aligned(call.cos, 1, 0, type) &&
         is_aligned(call.sin, 1, 0, type) &&
         std::all_of(std::begin(call.parts), std::end(call.parts), [&](const RotaryHeads& part) {
           return part.heads == 0 ||
                  (are_aligned(part.x, part.from, type) && are_aligned(part.out, part.to, type));
         });
}

std::int64_t most_heads(const Rotary& call) {
  std::int64_t heads = 1;
  for (const RotaryHeads& part : call.parts) {
    heads = std::max(heads, part.heads);
  }
  return heads;
}

/// A thread reads its part of the tables once and uses it for up to this many heads.
constexpr std::int64_t kHeadsOfThread = 8;

/// The block size: vectors by heads by positions. A block has as many positions as it has threads
/// for, but at most 64, the limit of the third dimension.
dim3 threads_of_positions(std::int64_t vectors, std::int64_t heads) {
  const std::int64_t x = std::min<std::int64_t>(vectors, kThreads);
  const std::int64_t y = std::min(divide_up(heads, kHeadsOfThread), kThreads / x);
  const std::int64_t z = std::min<std::int64_t>(kThreads / (x * y), 64);
  return {static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
}

}  // namespace

void launch(const Rotary& call, Element type, cudaStream_t stream) {
  with_vectors(type, halves_are_aligned(call, type), [&]<class T, int N>() {
    const dim3 block = threads_of_positions(divide_up(call.half, N), most_heads(call));
    const std::int64_t blocks = divide_up(call.batch * call.sequence, block.z);
    const auto grid = static_cast<unsigned>(std::min<std::int64_t>(blocks, 1 << 30));
    rotary_kernel<T, N><<<grid, block, 0, stream>>>(call);
  });
}

}  // namespace tessera::kernels
