#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <iterator>
#include <system_error>
#include <utility>

#include "stored_step.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/threads.h"

namespace tessera::checkpoint {
namespace {

/// Runs each task once, on the calling thread and up to `threads` - 1 others. All threads have the
/// caller's thread-local state. Rethrows the error of a failed task.
void run_on_threads(int threads, const std::vector<std::function<void()>>& tasks) {
  std::atomic<std::size_t> next{0};
  const auto run_what_is_left = [&] {
    try {
      for (std::size_t i = next++; i < tasks.size(); i = next++) {
        tasks[i]();
      }
    } catch (...) {
      next = tasks.size();
      throw;
    }
  };
  const tessera::detail::StateOfThread state;
  // After an exception, the destructors of these std::async futures still wait for the threads.
  std::vector<std::future<void>> others;
  for (int i = 1; i < threads; ++i) {
    others.push_back(std::async(std::launch::async | std::launch::deferred, [&] {
      const tessera::detail::StateOfThreadScope guard(state);
      run_what_is_left();
    }));
  }
  run_what_is_left();
  for (std::future<void>& other : others) {
    other.get();
  }
}

/// The smallest number of bytes per thread for which another thread saves time.
constexpr std::int64_t kLeastBytesOfAThread = std::int64_t{4} << 20;

void read_piece(const SafetensorsFile& file, const std::string& name,
                std::span<const std::int64_t> from, const at::Tensor& target) {
  try {
    file.read_into(name, from, target);
  } catch (const tessera::detail::ReadError&) {
    throw;
  } catch (const Error& error) {
    fail("tensor '", name, "': ", error.what());
  }
}

/// The size is checked first: "wrong size" is the clearest message for a truncated file.
SafetensorsFile open_file_of_step(const std::filesystem::path& folder, const FileRecord& record) {
  const std::filesystem::path path = folder / record.name;
  std::error_code error;
  const auto found = std::filesystem::file_size(path, error);
  if (error) {
    throw tessera::detail::ReadError(
        tessera::detail::concat("cannot read the size of '", path.string(), "': ", error.message(),
                                ": copy the whole folder, or load another step"),
        error == std::errc::no_such_file_or_directory ? path : std::filesystem::path());
  }
  if (found != record.bytes) {
    const files::InputFile refuses_lfs_pointers(path, "a file of a step", Symlinks::kRefuse);
  }
  TESSERA_CHECK(found == record.bytes, "'", path.string(), "' has ", found,
                " bytes, but the manifest says ", record.bytes,
                ": copy the file again, or load another step");
  return SafetensorsFile(path, Symlinks::kRefuse, record.sums);
}

}  // namespace

/// Splits a read into pieces of bounded size. A piece's size is counted in the wider of the file's
/// and the target's dtype, because a conversion needs memory in both.
void PieceReads::add(const SafetensorsFile& file, const std::string& name,
                     std::span<const std::int64_t> from, const at::Tensor& target) {
  const std::int64_t width = std::max(
      target.element_size(), static_cast<std::int64_t>(c10::elementSize(file.entry(name).dtype)));
  for_each_piece(target.sizes(), limits_.piece_bytes / width, [&](auto offset, auto sizes) {
    const at::Tensor piece = block_at(target, offset, sizes);
    pieces_.push_back({[&file, name, place = moved(from, offset), piece] {
                         read_piece(file, name, place, piece);
                       },
                       static_cast<std::int64_t>(piece.nbytes())});
  });
  bytes_ += static_cast<std::int64_t>(target.nbytes());
}

/// Reads the pieces with several threads. A task has several neighbouring pieces, because any read
/// reads a whole 1 MiB block. More tasks than threads balance the threads' speeds.
void PieceReads::run() {
  const auto threads = std::clamp<std::int64_t>(bytes_ / kLeastBytesOfAThread, 1, limits_.threads);
  const std::int64_t bytes_of_share = std::max(bytes_ / (4 * threads), kLeastBytesOfAThread);
  std::vector<std::function<void()>> shares;
  for (std::size_t first = 0, end = 0; first < pieces_.size(); first = end) {
    for (std::int64_t bytes = 0; end < pieces_.size() && bytes < bytes_of_share; ++end) {
      bytes += pieces_[end].bytes;
    }
    shares.push_back([this, first, end] {
      for (std::size_t i = first; i < end; ++i) {
        pieces_[i].read();
      }
    });
  }
  run_on_threads(static_cast<int>(threads), shares);
}

void check_entry(const SafetensorsFile& file, const std::string& name, const ManifestTensor& tensor,
                 const ManifestChunk& chunk) {
  const TensorEntry& entry = file.entry(name);
  TESSERA_CHECK(entry.dtype_name == tensor.dtype && entry.sizes == chunk.sizes, "tensor '", name,
                "' of '", file.path().string(), "' is ", entry.dtype_name,
                fmt::format(" [{}], but the manifest says ", fmt::join(entry.sizes, ", ")),
                tensor.dtype, fmt::format(" [{}]", fmt::join(chunk.sizes, ", ")),
                ": copy the step again, or load another step");
}

StoredStep::StoredStep(std::filesystem::path folder, Manifest manifest)
    : folder_(std::move(folder)), manifest_(std::move(manifest)) {
  for (const auto& [name, tensor] : manifest_.tensors) {
    for (const std::string& tied : tensor.tied) {
      stored_names_.emplace(tied, name);
    }
  }
}

const std::string& StoredStep::stored_name(const std::string& name) const {
  const auto tied = stored_names_.find(name);
  return manifest_.tensors.contains(name) || tied == stored_names_.end() ? name : tied->second;
}

const ManifestTensor* StoredStep::find(const std::string& name) const {
  const auto found = manifest_.tensors.find(stored_name(name));
  return found == manifest_.tensors.end() ? nullptr : &found->second;
}

void StoredStep::want(const std::string& name, std::span<const std::int64_t> offset,
                      const at::Tensor& block) {
  const ManifestTensor& tensor = *find(name);
  const std::span<const std::int64_t> sizes(block.sizes().data(), block.sizes().size());
  for (const ManifestChunk& chunk : tensor.chunks) {
    const auto common = common_block(offset, sizes, chunk.offset, chunk.sizes);
    if (!common) {
      continue;
    }
    std::vector<std::int64_t> within;
    for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
      within.push_back(common->global_offset[dim] - offset[dim]);
    }
    wanted_[chunk.file].push_back({stored_name(name), &tensor, &chunk, common->local_offset,
                                   local_block(block, Box{{}, within, common->sizes})});
  }
}

SafetensorsFile StoredStep::open(std::size_t file, const std::vector<Wanted>& wanted) const {
  SafetensorsFile opened = open_file_of_step(folder_, manifest_.files.at(file));
  for (const Wanted& each : wanted) {
    check_entry(opened, each.name, *each.tensor, *each.chunk);
  }
  return opened;
}

void StoredStep::check() const {
  for (const auto& [file, wanted] : wanted_) {
    open(file, wanted);
  }
}

void StoredStep::read(const ReadLimits& limits) {
  for (const auto& [index, wanted] : std::exchange(wanted_, {})) {
    const SafetensorsFile file = open(index, wanted);
    // Reads are sorted by file offset, so that a 1 MiB block is read only once, even if several
    // reads need parts of the block.
    std::vector<const Wanted*> order;
    std::ranges::transform(wanted, std::back_inserter(order),
                           [](const auto& each) { return &each; });
    std::ranges::stable_sort(order, {},
                             [&](const auto* each) { return file.entry(each->name).offset; });
    PieceReads reads(limits);
    for (const Wanted* each : order) {
      reads.add(file, each->name, each->from, each->target);
    }
    reads.run();
  }
}

at::Tensor StoredStep::values(const std::string& name, std::span<const std::int64_t> offset,
                              std::span<const std::int64_t> sizes, c10::ScalarType type) {
  at::Tensor values = at::empty(at::IntArrayRef(sizes.data(), sizes.size()), type);
  want(name, offset, values);
  read();
  return values;
}

}  // namespace tessera::checkpoint
