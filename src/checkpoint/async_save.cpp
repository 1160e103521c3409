// Background checkpoint saves: tensors are copied to host memory; a thread writes the copies.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "ranks.h"
#include "save.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/comm/detail/streams.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/comm/world.h"
#include "tessera/core/detail/no_copy.h"
#include "tessera/core/detail/rounding.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {

/// A checkpoint save on a separate thread. Must not be used by two threads at the same time.
class BackgroundSave : tessera::detail::NoCopy {
 public:
  /// Starts a thread that writes the checkpoint. Throws Error if the thread cannot be created.
  BackgroundSave(comm::CommunicatorPtr hosts, PreparedSave prepared) : hosts_(std::move(hosts)) {
    try {
      thread_ = std::thread(
          [this, prepared = std::move(prepared)]() mutable { run(std::move(prepared)); });
    } catch (const std::system_error& error) {
      fail("cannot start a thread for the save in the background: ", error.what(),
           "; raise the process's limits of threads and memory, or call checkpoint::save()");
    }
  }
  /// Waits for the save to end. Prints an error of the save as a warning, unless wait() threw it.
  ~BackgroundSave() {
    try {
      wait_once();
    } catch (const std::exception& error) {
      TORCH_WARN("a checkpoint was not saved: ", error.what());
    }
  }

  bool done() const { return done_; }

  void wait() {
    join();
    error_thrown_ = true;
    if (error_ != nullptr) {
      std::rethrow_exception(error_);
    }
  }

  /// Like wait(), but throws an error of the save only if wait() has not thrown the error before.
  void wait_once() {
    join();
    if (!error_thrown_) {
      wait();
    }
  }

 private:
  void join() {
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  void run(PreparedSave prepared) {
    const comm::CallerScope caller("checkpoint::async_save");
    comm::take_warnings_of_thread();
    try {
      save_step(*hosts_, std::move(prepared));
    } catch (...) {
      error_ = std::current_exception();
    }
    done_ = true;
  }

  comm::CommunicatorPtr hosts_;
  std::exception_ptr error_;
  bool error_thrown_ = false;
  std::atomic<bool> done_{false};
  std::thread thread_;
};

namespace {

struct Mapping {
  void* memory = nullptr;
  std::size_t size = 0;
};

/// Memory mappings of earlier saves, for the next save. Reused pages need no page fault or
/// clearing, unless the kernel has reclaimed the pages (MADV_FREE).
class KeptMappings {
 public:
  static KeptMappings& instance() {
    // The cache of mappings is never destroyed, because a save can end after main().
    static auto* const kept = new KeptMappings;
    return *kept;
  }

  /// Returns a cached mapping of `size` bytes. If there is none, the size of the saved state has
  /// changed: unmaps all cached mappings and returns an empty Mapping.
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
/// Host memory for copies of saved tensors, in huge pages (2 MiB) if possible: clearing new small
/// pages takes as long as the copies.
class HostMemory {
 public:
  /// Allocates memory for copies of the CPU blocks in `files`. Throws Error if that fails.
  explicit HostMemory(const std::vector<ShardFile>& files) {
    for (const ShardFile& file : files) {
      for (const FileChunk& chunk : file.chunks) {
        for (const RowBlock& block : chunk.blocks) {
          bytes_ += block.values.is_cuda() ? 0 : bytes_of_copy(block.values.sizes(), chunk.dtype);
        }
      }
    }
    if (bytes_ == 0) {
      return;
    }
    const auto size = static_cast<std::size_t>(bytes_);
    void* mapped = KeptMappings::instance().take(size).memory;
    if (mapped == nullptr) {
      mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TESSERA_CHECK(mapped != MAP_FAILED, "cannot allocate ", size,
                    " bytes for the copy of the tensors that async_save() writes: ",
                    std::strerror(errno), "; call checkpoint::save()");
      madvise(mapped, size, MADV_HUGEPAGE);  // errors are ignored: small pages also work
    }
    memory_ = std::shared_ptr<void>(
        mapped, [size](void* memory) { KeptMappings::instance().keep({memory, size}); });
  }

  /// Returns an uninitialized, contiguous tensor. The tensor keeps the host memory alive.
  at::Tensor take(at::IntArrayRef sizes, c10::ScalarType dtype) {
    const std::int64_t size = bytes_of_copy(sizes, dtype);
    TESSERA_CHECK(taken_ + size <= bytes_, "a copy of ", size, " bytes does not fit: ", taken_,
                  " of ", bytes_, " bytes are used");
    std::byte* const place = static_cast<std::byte*>(memory_.get()) + taken_;
    taken_ += size;
    return at::from_blob(place, sizes, [memory = memory_](void*) {}, at::dtype(dtype));
  }

 private:
  static std::int64_t bytes_of_copy(at::IntArrayRef sizes, c10::ScalarType dtype) {
    constexpr std::int64_t kLine = 64;
    return tessera::detail::round_up(
        c10::multiply_integers(sizes) * static_cast<std::int64_t>(c10::elementSize(dtype)), kLine);
  }

  std::shared_ptr<void> memory_;
  std::int64_t bytes_ = 0;
  std::int64_t taken_ = 0;
};

/// Replaces each tensor block in `files` by a host copy (page-locked for a GPU). The program may
/// then change model and optimizer.
void copy_to_host(std::vector<ShardFile>& files) {
  HostMemory memory(files);
  std::optional<c10::Device> device;
  for (ShardFile& file : files) {
    for (FileChunk& chunk : file.chunks) {
      for (RowBlock& block : chunk.blocks) {
        const bool pinned = block.values.is_cuda();
        const at::Tensor host =
            pinned ? at::empty(block.values.sizes(), at::dtype(chunk.dtype).pinned_memory(true))
                   : memory.take(block.values.sizes(), chunk.dtype);
        host.copy_(block.values, /*non_blocking=*/pinned);
        if (pinned) {
          device = block.values.device();
        }
        block.values = host;
      }
    }
  }
  if (device) {
    const comm::StreamsPtr streams = comm::make_streams(*device);
    streams->synchronize(streams->record(comm::Lane::kCompute));
  }
}

/// The background save that still runs, for each CPU process group.
class PendingSaves {
 public:
  static PendingSaves& instance() {
    static PendingSaves saves;
    return saves;
  }

  std::shared_ptr<BackgroundSave> of(const comm::Communicator& hosts) {
    const std::lock_guard lock(mutex_);
    const auto found = saves_.find(&hosts);
    return found == saves_.end() ? nullptr : found->second.lock();
  }

  void set(const comm::Communicator& hosts, const std::shared_ptr<BackgroundSave>& save) {
    const std::lock_guard lock(mutex_);
    std::erase_if(saves_, [](const auto& entry) { return entry.second.expired(); });
    saves_[&hosts] = save;
  }

 private:
  std::mutex mutex_;
  std::map<const comm::Communicator*, std::weak_ptr<BackgroundSave>> saves_;
};

}  // namespace

void finish_pending_save(comm::Communicator& hosts) {
  const std::shared_ptr<BackgroundSave> save = PendingSaves::instance().of(hosts);
  std::exception_ptr error;
  try {
    if (save != nullptr) {
      save->wait_once();
    }
  } catch (const comm::PeerError&) {
    throw;  // after an abort of the process group, all ranks throw PeerError
  } catch (...) {
    error = std::current_exception();
  }
  run_or_fail_on_all(hosts, [&] {
    if (error != nullptr) {
      std::rethrow_exception(error);
    }
  });
}

namespace {

/// Copies the state to host memory and starts a background save, which uses the process group
/// `hosts` until the end. Collective over `hosts`. Throws Error on all ranks if a copy fails.
std::shared_ptr<BackgroundSave> begin_save(const comm::CommunicatorPtr& hosts,
                                           PreparedSave prepared) {
  run_or_fail_on_all(*hosts, [&] { copy_to_host(prepared.files); });
  auto save = std::make_shared<BackgroundSave>(hosts, std::move(prepared));
  PendingSaves::instance().set(*hosts, save);
  return save;
}

}  // namespace

SaveFuture::SaveFuture(std::shared_ptr<BackgroundSave> save) : save_(std::move(save)) {}

bool SaveFuture::done() const {
  return save_ == nullptr || save_->done();
}

void SaveFuture::wait() {
  if (save_ != nullptr) {
    save_->wait();
  }
}

SaveFuture async_save(comm::World& world, const std::filesystem::path& dir, std::int64_t step,
                      const StateDict& state, const SaveOptions& options) {
  const comm::CallerScope caller("checkpoint::async_save");
  const at::NoGradGuard no_grad;
  const comm::CommunicatorPtr hosts = hosts_of_saves(world);
  finish_pending_save(*hosts);
  return SaveFuture(begin_save(hosts, prepare_save(*hosts, dir, step, state, options)));
}

}  // namespace tessera::checkpoint
