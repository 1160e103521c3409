#include "mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::data {
namespace {

/// Closes a descriptor at the end of a scope; a mapping stays valid without it.
struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) close(fd);
  }
};

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not wait for a writer.
  const Descriptor file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  TESSERA_CHECK(file.fd >= 0, "cannot open '", path, "': ", std::strerror(errno),
                ": give a file that exists and may be read");
  struct stat status {};
  TESSERA_CHECK(fstat(file.fd, &status) == 0, "cannot read '", path, "': ", std::strerror(errno));
  TESSERA_CHECK(S_ISREG(status.st_mode), "'", path, "' is not a regular file: give a file");
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ == 0) return;  // an empty range cannot be mapped
  void* address = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd, 0);
  TESSERA_CHECK(address != MAP_FAILED, "cannot map '", path, "': ", std::strerror(errno));
  data_ = static_cast<const std::byte*>(address);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace tessera::data
