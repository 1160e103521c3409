// Reads and writes one safetensors file, block by block.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "format.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"
#include "tessera/core/files.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::checkpoint {
namespace {

// Joins reads of nearby runs. A shard of columns consists of thousands of short runs, and one
// system call for each run would take longer than reading the gaps between runs.

/// Reads runs of a file, given in ascending order, into consecutive memory. Nearby runs are read
/// with one call `read(file offset, out, count)`.
template <class ReadBytes>
class RunReader {
 public:
  RunReader(std::byte* out, ReadBytes read) : out_(out), read_(std::move(read)) {}

  void add(std::uint64_t offset, std::uint64_t count) {
    // A run must not begin before the end of the preceding run, because the gap is computed as an
    // unsigned number.
    const bool near = !runs_.empty() && offset - end_ <= kMaxGap &&
                      offset + count - runs_.front().offset <= kMaxSpan;
    if (!near) {
      flush();
    }
    runs_.push_back({offset, count});
    end_ = offset + count;
  }

  /// Reads the collected runs: a single run directly into its destination, several runs through the
  /// buffer.
  void flush() {
    if (runs_.size() == 1) {
      read_(end_ - runs_[0].count, out_, runs_[0].count);
    }
    if (runs_.size() > 1) {
      read_together();
    }
    for (const auto& run : runs_) {
      out_ += run.count;
    }
    runs_.clear();
  }

 private:
  /// The largest gap between two runs that are read together. Reading an eighth of the columns (3.5
  /// KiB of every 28 KiB) from a cold disk took 0.08 s instead of 0.8 s; with gaps of 100 KiB,
  /// joint reads took longer.
  static constexpr std::uint64_t kMaxGap = std::uint64_t{64} << 10;
  /// The maximum number of bytes of a joint read, which limits the size of the buffer.
  static constexpr std::uint64_t kMaxSpan = 1 << 20;

  struct Run {
    std::uint64_t offset;
    std::uint64_t count;
  };

  void read_together() {
    const auto begin = runs_.front().offset;
    buffer_.resize(end_ - begin);
    read_(begin, buffer_.data(), buffer_.size());
    auto* out = out_;
    for (const auto& run : runs_) {
      std::memcpy(out, buffer_.data() + (run.offset - begin), run.count);
      out += run.count;
    }
  }

  /// The destination in memory of the next run.
  std::byte* out_;
  ReadBytes read_;
  /// The offset in the file at which the last added run ends.
  std::uint64_t end_ = 0;
  std::vector<Run> runs_;
  std::vector<std::byte> buffer_;
};

static_assert(std::endian::native == std::endian::little, "safetensors is little endian");

constexpr const char* kAdvice = ": copy or write it again";

}  // namespace

struct SafetensorsFile::Impl {
  Impl(files::InputFile opened, std::vector<std::uint32_t> sums)
      : file(std::move(opened), std::move(sums)) {}

  CheckedFile file;
  SafetensorsHeader header;

  /// Reads and checks the header. Errors about the content name the file and give advice here;
  /// errors of opening and reading have their own messages.
  void read_header();

 private:
  std::string invalid() const {
    return "'" + file.path().string() + "' is not a valid safetensors file: ";
  }
};

void SafetensorsFile::Impl::read_header() {
  const std::uint64_t file_bytes = file.size();
  std::uint64_t header_bytes = 0;
  TESSERA_CHECK(file_bytes >= sizeof(header_bytes), invalid(), "it has only ", file_bytes,
                " bytes: it is truncated", kAdvice);
  file.read_at(0, std::as_writable_bytes(std::span(&header_bytes, 1)));
  // The length is checked before memory is allocated, because the length comes from the file.
  TESSERA_CHECK(header_bytes <= kMaxHeaderBytes, invalid(), "its header claims ", header_bytes,
                " bytes, more than ", kMaxHeaderBytes, kAdvice);
  const std::uint64_t data_begin = sizeof(header_bytes) + header_bytes;
  TESSERA_CHECK(data_begin <= file_bytes, invalid(), "its header ends at ", data_begin,
                ", but the file has only ", file_bytes, " bytes: it is truncated", kAdvice);
  std::string json(header_bytes, '\0');
  file.read_at(sizeof(header_bytes), std::as_writable_bytes(std::span(json)));
  try {
    header = parse_header(json, file_bytes - data_begin);
  } catch (const Error& error) {
    fail(invalid(), error.what(), kAdvice);
  }
  // Offsets of entries are converted from offsets in the data to offsets in the file.
  for (auto& [name, entry] : header.tensors) {
    entry.offset += data_begin;
  }
}

namespace {

/// Throws Error for a bool that is neither 0 nor 1, because using such a bool would be undefined
/// behaviour.
void check_bools(const at::Tensor& tensor, const std::string& name) {
  if (tensor.scalar_type() != at::kBool) {
    return;
  }
  const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  const bool valid =
      std::all_of(bytes, bytes + tensor.numel(), [](unsigned char byte) { return byte <= 1; });
  TESSERA_CHECK(valid, "tensor '", name,
                "' of type BOOL holds a byte that is neither 0 nor 1: write the file again");
}

/// Whether bytes of a file can be read directly into `block`. Bools are excluded, because their
/// bytes are checked first.
bool takes_bytes(const at::Tensor& block, c10::ScalarType type) {
  return block.is_cpu() && block.is_contiguous() && block.scalar_type() == type &&
         type != at::kBool;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path, Symlinks symlinks,
                                 std::vector<std::uint32_t> sums)
    : impl_(std::make_unique<Impl>(files::InputFile(path, "a safetensors file", symlinks),
                                   std::move(sums))) {
  impl_->read_header();
}

SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;

const std::map<std::string, TensorEntry>& SafetensorsFile::tensors() const {
  return impl_->header.tensors;
}
const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return impl_->header.metadata;
}
const std::filesystem::path& SafetensorsFile::path() const {
  return impl_->file.path();
}

const TensorEntry& SafetensorsFile::entry(const std::string& name) const {
  const auto found = tensors().find(name);
  TESSERA_CHECK(found != tensors().end(), "'", path().string(), "' has no tensor '", name,
                "': give the file that belongs to this model");
  return found->second;
}

const TensorEntry& SafetensorsFile::entry_with(const std::string& name,
                                               std::span<const std::int64_t> offset,
                                               std::span<const std::int64_t> sizes) const {
  const auto& item = entry(name);
  TESSERA_CHECK(item.dtype != c10::ScalarType::Undefined, "tensor '", name, "' of '",
                path().string(), "' has the type ", item.dtype_name,
                ", which libtorch lacks: convert the file first");
  // Together with the checks of the header, this check guarantees that every run of the block is
  // inside the file.
  check_block(item.sizes, offset, sizes);
  return item;
}

void SafetensorsFile::read_bytes(const TensorEntry& item, std::span<const std::int64_t> offset,
                                 const at::Tensor& out) const {
  const auto itemsize = static_cast<std::uint64_t>(out.element_size());
  const std::span<const std::int64_t> sizes(out.sizes().data(), out.sizes().size());
  RunReader reader(static_cast<std::byte*>(out.mutable_data_ptr()),
                   [this](std::uint64_t at, std::byte* out, std::uint64_t count) {
                     impl_->file.read_at(at, {out, count});
                   });
  for_each_run(item.sizes, offset, sizes, [&](std::int64_t element, std::int64_t count) {
    reader.add(item.offset + static_cast<std::uint64_t>(element) * itemsize,
               static_cast<std::uint64_t>(count) * itemsize);
  });
  reader.flush();
}

at::Tensor SafetensorsFile::read(const std::string& name, std::span<const std::int64_t> offset,
                                 std::span<const std::int64_t> sizes) const {
  const TensorEntry& item = entry_with(name, offset, sizes);
  auto result =
      at::empty(at::IntArrayRef(sizes.data(), sizes.size()), at::TensorOptions(item.dtype));
  read_bytes(item, offset, result);
  check_bools(result, name);
  return result;
}

at::Tensor SafetensorsFile::read(const std::string& name) const {
  const auto& sizes = entry(name).sizes;
  return read(name, std::vector<std::int64_t>(sizes.size(), 0), sizes);
}

void SafetensorsFile::read_into(const std::string& name, std::span<const std::int64_t> offset,
                                const at::Tensor& block) const {
  const std::span<const std::int64_t> sizes(block.sizes().data(), block.sizes().size());
  const TensorEntry& item = entry_with(name, offset, sizes);
  if (takes_bytes(block, item.dtype)) {
    read_bytes(item, offset, block);
    // The direct read is counted as an in-place write of the tensor, as copy_() would be.
    tessera::detail::count_write(block);
  } else {
    block.copy_(read(name, offset, sizes));
  }
}

namespace {

/// The size of the pieces into which a long write is split.
constexpr std::size_t kPieceBytes = std::size_t{16} << 20;

}  // namespace

struct SafetensorsWriter::Impl {
  Impl(const std::filesystem::path& path, HeaderPlan planned, OnWrite observer)
      : path(path.string()), plan(std::move(planned)), file(path), on_write(std::move(observer)) {
    const std::uint64_t header_bytes = plan.json.size();
    data_begin = sizeof(header_bytes) + header_bytes;
    // If the disk is full, reserving space throws Error now, before all data were gathered.
    file.reserve(data_begin + plan.data_bytes);
    write_at(0, std::as_bytes(std::span(&header_bytes, 1)));
    write_at(sizeof(header_bytes), std::as_bytes(std::span(plan.json)));
    for (const auto& [name, entry] : plan.tensors) {
      missing.emplace(name, entry.bytes);
    }
  }

  void write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const auto piece = bytes.first(std::min(bytes.size(), kPieceBytes));
      file.write_at(offset, piece);
      if (on_write) {
        on_write(offset, piece);
      }
      offset += piece.size();
      bytes = bytes.subspan(piece.size());
    }
  }

  const TensorEntry& entry(const std::string& name) const {
    const auto found = plan.tensors.find(name);
    TESSERA_CHECK(found != plan.tensors.end(), "tensor '", name, "' was not announced for '", path,
                  "': list it among the items");
    return found->second;
  }

  /// Counts `bytes` of a tensor as written.
  void count(const std::string& name, std::uint64_t bytes) {
    auto& left = missing.at(name);
    TESSERA_CHECK(bytes <= left, "tensor '", name, "' was written twice to '", path,
                  "': write each element once");
    left -= bytes;
  }

  std::string path;
  HeaderPlan plan;
  files::AtomicFile file;
  OnWrite on_write;
  std::uint64_t data_begin = 0;
  /// For each tensor: number of bytes not yet written.
  std::map<std::string, std::uint64_t> missing;
};

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     const std::vector<Item>& items,
                                     const std::map<std::string, std::string>& metadata,
                                     OnWrite on_write)
    : impl_(std::make_unique<Impl>(path, plan_header(items, metadata), std::move(on_write))) {}

SafetensorsWriter::~SafetensorsWriter() = default;
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;

std::vector<std::string> SafetensorsWriter::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : impl_->plan.tensors) {
    names.push_back(name);
  }
  std::ranges::stable_sort(names, {},
                           [this](const std::string& name) { return impl_->entry(name).offset; });
  return names;
}

void SafetensorsWriter::write(const std::string& name, const at::Tensor& tensor) {
  const auto& entry = impl_->entry(name);
  TESSERA_CHECK(tensor.sizes() == at::IntArrayRef(entry.sizes), "tensor '", name, "' has sizes ",
                tensor.sizes(), ", announced were ", at::IntArrayRef(entry.sizes),
                ": write what was announced");
  write(name, std::vector<std::int64_t>(entry.sizes.size(), 0), tensor);
}

void SafetensorsWriter::write(const std::string& name, std::span<const std::int64_t> offset,
                              const at::Tensor& block) {
  const auto& entry = impl_->entry(name);
  TESSERA_CHECK(block.scalar_type() == entry.dtype, "tensor '", name, "' has the type ",
                c10::toString(block.scalar_type()), ", announced was ", c10::toString(entry.dtype),
                ": convert it first");
  const std::span<const std::int64_t> sizes(block.sizes().data(), block.sizes().size());
  check_block(entry.sizes, offset, sizes);
  // Conjugated and negated views are resolved, because the bytes of such views differ from the
  // values.
  const auto local = block.detach().resolve_conj().resolve_neg().cpu().contiguous();
  impl_->count(name, local.nbytes());
  std::span bytes(static_cast<const std::byte*>(local.const_data_ptr()), local.nbytes());
  const auto itemsize = static_cast<std::uint64_t>(block.element_size());
  for_each_run(entry.sizes, offset, sizes, [&](std::int64_t element, std::int64_t count) {
    const auto run = static_cast<std::uint64_t>(count) * itemsize;
    impl_->write_at(
        impl_->data_begin + entry.offset + static_cast<std::uint64_t>(element) * itemsize,
        bytes.first(run));
    // Runs are visited in the row-major order of the block, so the bytes of the block are used
    // sequentially.
    bytes = bytes.subspan(run);
  });
}

/// Syncs the temporary file before publish() renames it: after a crash, the final name must not
/// refer to an incomplete file.
void SafetensorsWriter::seal() {
  for (const auto& [name, bytes] : impl_->missing) {
    TESSERA_CHECK(bytes == 0, bytes, " bytes of tensor '", name, "' were not written to '",
                  impl_->path, "': write every tensor before finish()");
  }
  impl_->file.sync();
}

void SafetensorsWriter::publish() {
  impl_->file.publish();
}

void SafetensorsWriter::finish() {
  seal();
  publish();
}

}  // namespace tessera::checkpoint
