#include "watch/record_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <random>
#include <sstream>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kRecordBytes = sizeof(flight::Record);

flight::Record* map_record(int fd) {
  void* base = mmap(nullptr, kRecordBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return base == MAP_FAILED ? nullptr : static_cast<flight::Record*>(base);
}

int make_memory(const std::string& path) {
  constexpr mode_t kMode = 0644;
  // Cutting an older file short would end a process that still maps it with SIGBUS.
  unlink(path.c_str());
  const int fd = path.empty() ? memfd_create("tessera-record", MFD_CLOEXEC)
                              : ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, kMode);
  // Reserved, since a full disk would show as SIGBUS once the memory is written to.
  const int error = fd < 0 ? errno : posix_fallocate(fd, 0, static_cast<off_t>(kRecordBytes));
  if (error != 0) {
    close(fd);
    fail("the flight record ", path, " cannot be made: ", std::strerror(error),
         "; give a folder that exists and can be written as TESSERA_RUN_DIR");
  }
  return fd;
}

}  // namespace

RecordMemory::~RecordMemory() {
  munmap(record_, kRecordBytes);
  close(fd_);
}

RecordPtr RecordMemory::create(const std::string& path) {
  const int fd = make_memory(path);
  flight::Record* memory = map_record(fd);
  TESSERA_CHECK(memory != nullptr, "the flight record cannot be mapped: ", std::strerror(errno));
  RecordPtr made(new RecordMemory(fd, new (memory) flight::Record));
  std::random_device random;
  memory->token = (std::uint64_t{random()} << 32) | random();
  memory->bytes = kRecordBytes;
  const std::string place =
      path.empty() ? "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd) : path;
  made->handle_ = std::to_string(memory->token) + " " + place;
  return made;
}

RecordPtr RecordMemory::open(const std::string& handle) {
  std::istringstream text(handle);
  std::uint64_t token = 0;
  std::string path;
  text >> token >> std::ws;
  std::getline(text, path);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  struct stat status {};
  flight::Record* record =
      fd >= 0 && fstat(fd, &status) == 0 && status.st_size == static_cast<off_t>(kRecordBytes)
          ? map_record(fd)
          : nullptr;
  if (record == nullptr) {
    close(fd);
    return nullptr;
  }
  RecordPtr opened(new RecordMemory(fd, record));
  opened->handle_ = handle;
  // In another pid namespace that pid is another process.
  return record->token == token && record->magic == flight::kMagic ? opened : nullptr;
}

}  // namespace tessera::comm
