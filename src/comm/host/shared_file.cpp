#include "host/shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <sstream>
#include <system_error>
#include <utility>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

std::string identity_of(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 ? detail::concat(status.st_dev, ":", status.st_ino) : "";
}

}  // namespace

SharedFile map_file(int fd, bool keeps_open) {
  struct stat status {};
  const std::size_t bytes = fstat(fd, &status) == 0 ? static_cast<std::size_t>(status.st_size) : 0;
  void* const base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED || !keeps_open) {
    close(std::exchange(fd, -1));
  }
  if (base == MAP_FAILED) {
    return {};
  }
  return {std::shared_ptr<void>(base,
                                [fd, bytes](void* mapped) {
                                  munmap(mapped, bytes);
                                  close(fd);
                                }),
          bytes};
}

std::string handle_of_file(int fd) {
  const std::string link = detail::concat("/proc/", getpid(), "/fd/", fd);
  struct stat status {};
  std::error_code error;
  // The handle of a file with a name is the name, which is valid after this process has ended.
  const bool has_name = fstat(fd, &status) == 0 && status.st_nlink > 0;
  const std::string path = has_name ? std::filesystem::read_symlink(link, error).string() : link;
  return detail::concat(identity_of(fd), ' ', path);
}

SharedFile open_file(const std::string& handle) {
  std::istringstream text(handle);
  std::string identity;
  std::string path;
  text >> identity >> std::ws;
  std::getline(text, path);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  // In another pid namespace, `path` can be a different file. identity_of() detects that.
  const bool is_same = identity_of(fd) == identity;
  SharedFile file = map_file(fd, /*keeps_open=*/false);
  return is_same ? file : SharedFile{};
}

}  // namespace tessera::comm
