#include "save/host_memory.h"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <vector>

#include "tessera/core/detail/rounding.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {

namespace {

struct Mapping {
  void* memory = nullptr;
  std::size_t size = 0;
};

/// Mappings between two saves. The kernel may take their pages whenever it wants them (MADV_FREE);
/// what it has left the next save need not have cleared again.
class KeptMappings {
 public:
  static KeptMappings& instance() {
    static auto* const kept = new KeptMappings;  // a save may end after main()
    return *kept;
  }

  /// One of this size. If there is none, those of other sizes go: the state has changed.
  Mapping take(std::size_t size) {
    const std::lock_guard lock(mutex_);
    const auto found = std::ranges::find(kept_, size, &Mapping::size);
    if (found == kept_.end()) {
      for (const Mapping& other : kept_) {
        munmap(other.memory, other.size);
      }
      kept_.clear();
      return {};
    }
    const Mapping mapping = *found;
    kept_.erase(found);
    return mapping;
  }

  void keep(const Mapping& mapping) {
    madvise(mapping.memory, mapping.size, MADV_FREE);
    const std::lock_guard lock(mutex_);
    kept_.push_back(mapping);
  }

 private:
  std::mutex mutex_;
  std::vector<Mapping> kept_;
};

Mapping new_mapping(std::size_t size) {
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TESSERA_CHECK(mapped != MAP_FAILED, "the copy of ", size,
                " bytes that a save in the background writes has no memory: ", std::strerror(errno),
                ": save at once");
  madvise(mapped, size, MADV_HUGEPAGE);  // a wish
  return {mapped, size};
}

}  // namespace

HostMemory::HostMemory(std::int64_t bytes) : bytes_(bytes) {
  if (bytes == 0) {
    return;
  }
  const auto size = static_cast<std::size_t>(bytes);
  Mapping mapping = KeptMappings::instance().take(size);
  if (mapping.memory == nullptr) {
    mapping = new_mapping(size);
  }
  memory_ = std::shared_ptr<void>(mapping.memory,
                                  [mapping](void*) { KeptMappings::instance().keep(mapping); });
}

std::int64_t HostMemory::rounded(std::int64_t bytes) {
  constexpr std::int64_t kLine = 64;
  return tessera::detail::round_up(bytes, kLine);
}

at::Tensor HostMemory::take(at::IntArrayRef sizes, c10::ScalarType dtype) {
  const std::int64_t size =
      rounded(c10::multiply_integers(sizes) * static_cast<std::int64_t>(c10::elementSize(dtype)));
  TESSERA_CHECK(taken_ + size <= bytes_, "a copy of ", size, " bytes was to be put behind ", taken_,
                " of ", bytes_);
  std::byte* const place = static_cast<std::byte*>(memory_.get()) + taken_;
  taken_ += size;
  return at::from_blob(place, sizes, [memory = memory_](void*) {}, at::dtype(dtype));
}

}  // namespace tessera::checkpoint
