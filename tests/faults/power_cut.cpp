#include "faults/power_cut.h"

#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <iterator>

namespace tessera::testing {
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
