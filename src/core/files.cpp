#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <iostream>
#include <system_error>
#include <utility>

#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"

namespace tessera::files {

// AtomicFile writes files that are either complete or absent, even after a crash. AtomicFile syncs
// a temporary file, renames the file, and syncs the folder.

namespace {

/// The suffix that follows the final name in a temporary file's name. The suffix contains the
/// machine's name, because file locks may not work across machines.
std::string temporary_mark() {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  return std::string(".tmp-") + host.data() + "-";
}

/// Returns the name of a temporary file without the number at the end. The leading dot hides the
/// file from shell patterns.
std::string temporary_prefix(const std::filesystem::path& path) {
  return "." + path.filename().string() + temporary_mark();
}

/// The maximum number of bytes that are written but not yet on the disk. The limit keeps sync()
/// short, because other ranks can wait during sync().
constexpr std::uint64_t kMostUnsynced = std::uint64_t{16} << 20;

template <class Call>
auto uninterrupted(const Call& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) {
    result = call();
  }
  return result;
}

std::filesystem::path folder_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

/// Whether an open file still has a name. Another process can remove the file as stale between
/// open() and flock().
bool still_linked(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 && status.st_nlink > 0;
}

/// Whether a file has two names, that is, whether link() has succeeded. link() on NFS sometimes
/// returns an error although the link was made.
bool has_two_names(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 && status.st_nlink == 2;
}

/// Throws Error if `path` is a device, a pipe or a socket, which rename() would replace.
void check_replaceable(const std::filesystem::path& path) {
  std::error_code ignored;  // errors of status() are ignored: open() describes errors better
  const auto status = std::filesystem::status(path, ignored);
  TESSERA_CHECK(!std::filesystem::is_other(status), "cannot write '", path.string(),
                "', which is a device, a pipe or a socket: pass the path of a regular file");
}

void write_whole(AtomicFile& file, const std::string& text) {
  file.write_at(0, std::as_bytes(std::span(text)));
  file.sync();
}

}  // namespace

void flush_output() {
  TESSERA_CHECK(std::cout.flush(),
                "standard output can't be written: check the disk and the program that reads it");
}

std::filesystem::path absolute_path(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::path absolute = path.empty() ? path : std::filesystem::absolute(path, error);
  return error ? path : absolute;
}

AtomicFile::AtomicFile(std::filesystem::path path) : path_(absolute_path(path)) {
  check_replaceable(path_);
  const std::string own = path_.filename().string();
  remove_leftovers(folder_of(path_), [&own](const std::string& name) { return name == own; });
  open_temporary();
}

AtomicFile::~AtomicFile() {
  if (!temporary_.empty()) {
    unlink(temporary_.c_str());
  }
  if (fd_ >= 0) {
    close(fd_);
  }
}

void AtomicFile::open_temporary() {
  // The process id alone does not make a name unique, because threads of one process can write to
  // one path at the same time.
  static std::atomic<int> counter{0};
  while (fd_ < 0) {
    temporary_ = folder_of(path_) / (temporary_prefix(path_) + std::to_string(getpid()) + "-" +
                                     std::to_string(counter++));
    fd_ = open(temporary_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    // If the temporary file exists, an ended process with the same process id has left the file.
    if (fd_ < 0 && errno == EEXIST) {
      continue;
    }
    if (fd_ < 0) {
      temporary_.clear();
      fail_system("cannot write");
    }
    // The file lock shows other processes that this writer is alive. Before the lock, another
    // process can remove the file as stale. This writer then tries another file name.
    const bool is_taken = flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    if (is_taken || !still_linked(fd_)) {
      close(std::exchange(fd_, -1));
    }
  }
}

/// fallocate() also extends the file, so callers must reserve exactly as many bytes as they write.
/// On a file system without fallocate (NFS before 4.2) nothing is reserved.
void AtomicFile::reserve(std::uint64_t bytes) {
  const auto allocate = [&] { return fallocate(fd_, 0, 0, static_cast<off_t>(bytes)); };
  if (bytes == 0 || uninterrupted(allocate) == 0) {
    return;
  }
  if (errno != EOPNOTSUPP) {
    fail_system("cannot reserve room for");
  }
}

void AtomicFile::write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto written = uninterrupted(
        [&] { return pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (written <= 0) {
      // write_at() reports EIO if pwrite() returns 0: repeated calls might never make progress.
      errno = written == 0 ? EIO : errno;
      fail_system("cannot write");
    }
    offset += static_cast<std::uint64_t>(written);
    unsynced_ += static_cast<std::uint64_t>(written);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  if (unsynced_ >= kMostUnsynced) {
    sync();
  }
}

/// sync() must precede publish(): a rename can reach the disk before the file's data.
void AtomicFile::sync() {
  if (uninterrupted([&] { return fsync(fd_); }) != 0) {
    fail_system("cannot sync");
  }
  unsynced_ = 0;
}

void AtomicFile::publish() {
  if (rename(temporary_.c_str(), path_.c_str()) != 0) {
    fail_system("cannot put in place");
  }
  temporary_.clear();
  sync_folder(folder_of(path_));
}

/// publish_new() uses link(), because rename() would replace a file of another process.
bool AtomicFile::publish_new() {
  const bool linked = link(temporary_.c_str(), path_.c_str()) == 0 || has_two_names(fd_);
  if (!linked && errno == EEXIST) {
    return false;
  }
  if (!linked && (errno == EPERM || errno == EOPNOTSUPP || errno == ENOSYS)) {
    publish();  // the file system has no hard links, so link() cannot work
    return true;
  }
  if (!linked) {
    fail_system("cannot put in place");
  }
  unlink(temporary_.c_str());
  temporary_.clear();
  sync_folder(folder_of(path_));
  return true;
}

void AtomicFile::fail_system(const char* what) const {
  fail(what, " '", path_.string(), "': ", std::strerror(errno),
       ": check that its folder exists, is writable and has room");
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  AtomicFile file(path);
  write_whole(file, text);
  file.publish();
}

bool write_new_file(const std::filesystem::path& path, const std::string& text) {
  AtomicFile file(path);
  write_whole(file, text);
  return file.publish_new();
}

// The kernel releases the lock of a file when its writer ends. So a temporary file that this
// process can lock has no writer, and remove_leftovers() removes the file.
void remove_leftovers(const std::filesystem::path& folder,
                      const std::function<bool(const std::string& name)>& of) {
  const std::string mark = temporary_mark();
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    const std::size_t end = name.find(mark);
    if (end == std::string::npos || !name.starts_with('.') || !of(name.substr(1, end - 1))) {
      continue;
    }
    // O_WRONLY: NFS needs an opened-for-writing file for an exclusive lock. O_NOFOLLOW: a symbolic
    // link must not be followed. O_NONBLOCK: opening a FIFO must not wait.
    const int fd = open(entry.path().c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0) {
      continue;
    }
    if (flock(fd, LOCK_EX | LOCK_NB) == 0) {
      unlink(entry.path().c_str());
    }
    close(fd);
  }
}

void sync_folder(const std::filesystem::path& folder) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool synced = fd >= 0 && uninterrupted([&] { return fsync(fd); }) == 0;
  const int error = errno;
  if (fd >= 0) {
    close(fd);
  }
  // EINVAL and EOPNOTSUPP mean that the file system cannot sync a folder and needs no sync.
  const bool not_needed = error == EINVAL || error == EOPNOTSUPP;
  TESSERA_CHECK(synced || not_needed, "cannot sync the folder '", folder.string(),
                "': ", std::strerror(error),
                ": the file is written, but a crash may undo the change; check the disk");
}

void create_folders(const std::filesystem::path& folder) {
  std::error_code error;
  if (folder.empty() || std::filesystem::exists(folder, error)) {
    return;
  }
  create_folders(folder.parent_path());
  if (std::filesystem::create_directory(folder, error)) {
    sync_folder(folder_of(folder));
    return;
  }
  std::error_code unknown;
  TESSERA_CHECK(!error || std::filesystem::is_directory(folder, unknown),
                "cannot create the folder '", folder.string(), "' in '", folder_of(folder).string(),
                "': ", error.message(), ": pass a writable folder on a disk with free space");
}

namespace {

[[noreturn]] void fail_to_open(const std::filesystem::path& path, const std::string& what) {
  const int error = errno;
  if (error == ELOOP) {
    throw detail::ReadError(detail::concat(
        "'", path.string(),
        "' is a symbolic link, but must be a regular file: replace the link with the file"));
  }
  throw detail::ReadError(
      detail::concat("cannot open '", path.string(), "': ", std::strerror(error), ": pass ", what,
                     " that exists and can be read"),
      error == ENOENT ? path : std::filesystem::path());
}

/// Throws Error if the file is a git-lfs pointer, which is about 130 bytes long.
void check_content(const InputFile& file) {
  constexpr std::uint64_t kLeastPointer = 100, kMostPointer = 300;
  if (file.size() >= kLeastPointer && file.size() <= kMostPointer) {
    std::string text(file.size(), '\0');
    file.read_at(0, std::as_writable_bytes(std::span(text)));
    detail::refuse_lfs_pointer(file.path(), text);
  }
}

}  // namespace

InputFile::InputFile(std::filesystem::path path, std::string what, Symlinks symlinks)
    : path_(std::move(path)) {
  // O_NONBLOCK is set, because opening a FIFO must not wait for a writer.
  const int nofollow = symlinks == Symlinks::kRefuse ? O_NOFOLLOW : 0;
  fd_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | nofollow);
  try {
    if (fd_ < 0) {
      fail_to_open(path_, what);
    }
    struct stat status {};
    if (fstat(fd_, &status) != 0) {
      throw detail::ReadError(
          detail::concat("cannot read '", path_.string(), "': ", std::strerror(errno)));
    }
    TESSERA_CHECK(S_ISREG(status.st_mode), "'", path_.string(), "' is not a regular file: pass ",
                  what);
    size_ = static_cast<std::uint64_t>(status.st_size);
    check_content(*this);
  } catch (...) {
    close(fd_);
    throw;
  }
}

InputFile::~InputFile() {
  if (fd_ >= 0) {
    close(fd_);
  }
}

InputFile::InputFile(InputFile&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}

/// The loop is needed, because pread() can return fewer bytes than requested. 0 means end of file.
void InputFile::read_at(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const auto got = pread(fd_, out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0) {
      throw detail::ReadError(detail::concat(
          "reading '", path_.string(), "' failed: ", std::strerror(errno), ": check the disk"));
    }
    TESSERA_CHECK(got > 0, "'", path_.string(),
                  "' became shorter during the read: stop the programs that write to the file");
    offset += static_cast<std::uint64_t>(got);
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

std::string read_file(const std::filesystem::path& path, const std::string& what,
                      std::uint64_t max_bytes, Symlinks symlinks) {
  const InputFile file(path, what, symlinks);
  TESSERA_CHECK(file.size() <= max_bytes, "'", path.string(), "' has ", file.size(), " bytes, but ",
                what, " may have at most ", max_bytes, ": pass ", what);
  std::string text(file.size(), '\0');
  file.read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

}  // namespace tessera::files

namespace tessera::detail {

namespace {

/// The generator polynomial of CRC-32C; the coefficient of x^31 is in the lowest bit.
constexpr std::uint32_t kPolynomial = 0x82f63b78;

/// The usual table for CRC-32C: for each value of a byte, the value to XOR into the checksum.
constexpr std::array<std::uint32_t, 256> kTable = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < table.size(); ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1U) != 0 ? kPolynomial : 0);
    }
    table[byte] = crc;
  }
  return table;
}();

std::uint32_t by_table(std::span<const std::byte> bytes, std::uint32_t before) {
  std::uint32_t crc = ~before;
  for (const std::byte byte : bytes) {
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<std::uint32_t>(byte)) & 0xffU];
  }
  return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t by_instruction(std::span<const std::byte> bytes,
                                                               std::uint32_t before) {
  std::uint64_t crc = ~before;
  for (; bytes.size() >= sizeof(std::uint64_t); bytes = bytes.subspan(sizeof(std::uint64_t))) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), sizeof(word));
    crc = _mm_crc32_u64(crc, word);
  }
  auto last = static_cast<std::uint32_t>(crc);
  for (const std::byte byte : bytes) {
    last = _mm_crc32_u8(last, static_cast<std::uint8_t>(byte));
  }
  return ~last;
}
#endif

}  // namespace

std::vector<Crc32cWay> crc32c_ways() {
  std::vector<Crc32cWay> ways;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2") != 0) {
    ways.push_back({"instruction", by_instruction});
  }
#endif
  ways.push_back({"table", by_table});
  return ways;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) {
  static const auto sum = crc32c_ways().front().sum;
  return sum(bytes, before);
}

}  // namespace tessera::detail
