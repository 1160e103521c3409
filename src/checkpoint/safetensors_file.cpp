#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "block_runs.h"
#include "run_reader.h"
#include "safetensors_header.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors is little endian");

}  // namespace

struct SafetensorsFile::Impl {
  std::filesystem::path path;
  int fd = -1;
  SafetensorsHeader header;

  ~Impl() {
    if (fd >= 0) close(fd);
  }

  /// Returns the file's size.
  std::uint64_t open_file(Symlinks symlinks);
  void read_header(std::uint64_t file_bytes);
  void read_bytes(std::uint64_t offset, void* out, std::uint64_t count) const;
};

std::uint64_t SafetensorsFile::Impl::open_file(Symlinks symlinks) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  const int nofollow = symlinks == Symlinks::kRefuse ? O_NOFOLLOW : 0;
  fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | nofollow);
  TESSERA_CHECK(fd >= 0 || errno != ELOOP, "'", path.string(),
                "' is a symbolic link, which an index may not lead to: put the file itself there");
  TESSERA_CHECK(fd >= 0, "cannot open '", path.string(), "': ", std::strerror(errno),
                ": give a safetensors file that exists and may be read");
  struct stat status {};
  TESSERA_CHECK(fstat(fd, &status) == 0, "cannot read '", path.string(),
                "': ", std::strerror(errno));
  TESSERA_CHECK(S_ISREG(status.st_mode), "'", path.string(),
                "' is not a regular file: give a safetensors file");
  return static_cast<std::uint64_t>(status.st_size);
}

void SafetensorsFile::Impl::read_header(std::uint64_t file_bytes) {
  std::uint64_t header_bytes = 0;
  TESSERA_CHECK(file_bytes >= sizeof(header_bytes), "it has only ", file_bytes,
                " bytes: it is truncated");
  read_bytes(0, &header_bytes, sizeof(header_bytes));
  TESSERA_CHECK(header_bytes <= kMaxHeaderBytes, "its header claims ", header_bytes,
                " bytes, more than ", kMaxHeaderBytes);
  const std::uint64_t data_begin = sizeof(header_bytes) + header_bytes;
  TESSERA_CHECK(data_begin <= file_bytes, "its header ends at ", data_begin,
                ", but the file has only ", file_bytes, " bytes: it is truncated");
  std::string json(header_bytes, '\0');
  read_bytes(sizeof(header_bytes), json.data(), header_bytes);
  header = parse_header(json, file_bytes - data_begin);
  for (auto& [name, entry] : header.tensors) entry.offset += data_begin;
}

void SafetensorsFile::Impl::read_bytes(std::uint64_t offset, void* out, std::uint64_t count) const {
  auto* bytes = static_cast<std::byte*>(out);
  while (count > 0) {
    const auto got = pread(fd, bytes, count, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    TESSERA_CHECK(got >= 0, "reading '", path.string(), "' failed: ", std::strerror(errno),
                  ": check the disk");
    TESSERA_CHECK(got > 0, "'", path.string(),
                  "' became shorter while it was read: let no one write to it, and load again");
    bytes += got;
    offset += static_cast<std::uint64_t>(got);
    count -= static_cast<std::uint64_t>(got);
  }
}

namespace {

/// A bool that is neither 0 nor 1 is undefined behaviour for whoever reads it.
void check_bools(const at::Tensor& tensor, const std::string& name) {
  if (tensor.scalar_type() != at::kBool) return;
  const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  const bool valid =
      std::all_of(bytes, bytes + tensor.numel(), [](unsigned char byte) { return byte <= 1; });
  TESSERA_CHECK(valid, "tensor '", name,
                "' of type BOOL holds a byte that is neither 0 nor 1: write the file again");
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path, Symlinks symlinks)
    : impl_(std::make_unique<Impl>()) {
  impl_->path = path;
  const auto file_bytes = impl_->open_file(symlinks);
  try {
    impl_->read_header(file_bytes);
  } catch (const Error& error) {
    fail("'", path.string(), "' is not a valid safetensors file: ", error.what(),
         ": copy or write it again");
  }
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
  return impl_->path;
}

const TensorEntry& SafetensorsFile::entry(const std::string& name) const {
  const auto found = tensors().find(name);
  TESSERA_CHECK(found != tensors().end(), "'", path().string(), "' has no tensor '", name,
                "': give the file that belongs to this model");
  return found->second;
}

at::Tensor SafetensorsFile::read(const std::string& name, std::span<const std::int64_t> offset,
                                 std::span<const std::int64_t> sizes) const {
  const auto& item = entry(name);
  TESSERA_CHECK(item.dtype != c10::ScalarType::Undefined, "tensor '", name, "' of '",
                path().string(), "' has the type ", item.dtype_name,
                ", which libtorch lacks: convert the file first");
  check_block(item.sizes, offset, sizes);
  const auto result =
      at::empty(at::IntArrayRef(sizes.data(), sizes.size()), at::TensorOptions(item.dtype));
  const auto itemsize = static_cast<std::uint64_t>(result.element_size());
  RunReader reader(static_cast<std::byte*>(result.mutable_data_ptr()),
                   [this](std::uint64_t at, std::byte* out, std::uint64_t count) {
                     impl_->read_bytes(at, out, count);
                   });
  for_each_run(item.sizes, offset, sizes, [&](std::int64_t element, std::int64_t count) {
    reader.add(item.offset + static_cast<std::uint64_t>(element) * itemsize,
               static_cast<std::uint64_t>(count) * itemsize);
  });
  reader.flush();
  check_bools(result, name);
  return result;
}

at::Tensor SafetensorsFile::read(const std::string& name) const {
  const auto& sizes = entry(name).sizes;
  return read(name, std::vector<std::int64_t>(sizes.size(), 0), sizes);
}

}  // namespace tessera::checkpoint
