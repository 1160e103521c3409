#include "faults/changes.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <utility>

namespace tessera::testing {

/// The ChangesSlot is never destroyed: the process makes system calls before and after main().
ChangesSlot& changes_slot() {
  static auto* const slot = new ChangesSlot;
  return *slot;
}

std::uint64_t file_of(int fd) {
  struct stat status {};
  return fstat(fd, &status) == 0 ? status.st_ino : 0;
}

bool path_of(int fd, std::array<char, PATH_MAX>& path) {
  std::array<char, 64> name{};
  std::snprintf(name.data(), name.size(), "/proc/self/fd/%d", fd);
  const int error = errno;
  const ssize_t length = readlink(name.data(), path.data(), path.size() - 1);
  errno = error;
  path[length > 0 ? static_cast<std::size_t>(length) : 0] = '\0';
  return length > 0;
}

Changes::Changes(const std::filesystem::path& folder) : folder_(folder.string()) {
  const std::lock_guard lock(changes_slot().mutex);
  changes_slot().changes = this;
}

Changes::~Changes() {
  const std::lock_guard lock(changes_slot().mutex);
  changes_slot().changes = nullptr;
}

void Changes::add(Change change) {
  if (change.path.starts_with(folder_)) {
    list_.push_back(std::move(change));
  }
}

void Changes::add(int fd, Change change) {
  std::array<char, PATH_MAX> path{};
  if (path_of(fd, path)) {
    change.path = path.data();
    change.file = file_of(fd);
    add(std::move(change));
  }
}

namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kFolder = 0;

std::string bytes_of_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

Disk::Disk(const fs::path& folder) : root_(folder.string()) {
  add_folder(folder);
  durable_ = now_;
}

void Disk::add_folder(const fs::path& folder) {
  Names& names = now_.folders[folder.string()];
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (entry.is_directory()) {
      names[name] = kFolder;
      add_folder(entry.path());
      continue;
    }
    struct stat status {};
    stat(entry.path().c_str(), &status);
    names[name] = id_of_[status.st_ino] = ++last_;
    now_.files[last_] = bytes_of_file(entry.path());
  }
}

Disk::Names& Disk::names_beside(const std::string& path) {
  return now_.folders[fs::path(path).parent_path().string()];
}

void Disk::apply(const Change& change) {
  const std::string name = fs::path(change.path).filename().string();
  switch (change.kind) {
    case Change::kMakeFolder:
      names_beside(change.path)[name] = kFolder;
      now_.folders[change.path] = durable_.folders[change.path] = {};
      break;
    case Change::kRemoveFolder:
    case Change::kUnlink:
      names_beside(change.path).erase(name);
      break;
    case Change::kCreate:
      names_beside(change.path)[name] = id_of_[change.file] = ++last_;
      break;
    case Change::kWrite: {
      std::string& bytes = now_.files[id_of_[change.file]];
      const auto begin = static_cast<std::size_t>(change.offset);
      bytes.resize(std::max(bytes.size(), begin + change.bytes.size()));
      bytes.replace(begin, change.bytes.size(), change.bytes);
      break;
    }
    case Change::kSync:
      sync(change);
      break;
    case Change::kRename:
    case Change::kLink:
      names_beside(change.to)[fs::path(change.to).filename().string()] =
          names_beside(change.path).at(name);
      if (change.kind == Change::kRename) {
        names_beside(change.path).erase(name);
      }
      break;
  }
}

void Disk::sync(const Change& change) {
  if (now_.folders.contains(change.path)) {
    durable_.folders[change.path] = now_.folders[change.path];
  } else {
    durable_.files[id_of_[change.file]] = now_.files[id_of_[change.file]];
  }
}

void Disk::write_after_power_cut(const fs::path& out, Lost lost) const {
  fs::remove_all(out);
  write_folder(root_, out, lost);
}

void Disk::write_folder(const std::string& folder, const fs::path& out, Lost lost) const {
  fs::create_directory(out);
  const View& names = lost == Lost::kAll ? durable_ : now_;
  for (const auto& [name, file] : names.folders.at(folder)) {
    if (file == kFolder) {
      write_folder(folder + "/" + name, out / name, lost);
      continue;
    }
    const auto bytes = durable_.files.find(file);
    std::ofstream(out / name, std::ios::binary)
        << (bytes == durable_.files.end() ? "" : bytes->second);
  }
}

}  // namespace tessera::testing
