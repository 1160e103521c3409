// Files that processes of one machine map as shared memory.

#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace tessera::comm {

/// A file mapped into memory. The last copy of `base` unmaps the file. nullptr: the mapping failed.
struct SharedFile {
  std::shared_ptr<void> base;
  std::size_t bytes = 0;
};

/// Maps a whole file and takes ownership of the descriptor `fd`. Fails if `fd` is invalid.
/// `keeps_open`: whether `fd` stays open until the file is unmapped.
SharedFile map_file(int fd, bool keeps_open = true);
/// Returns a text with which other processes can open the file while this process has `fd` open.
std::string handle_of_file(int fd);
/// Maps a file of another process. `handle` is the text that handle_of_file() returned in that
/// process. Fails if this process cannot reach the file.
SharedFile open_file(const std::string& handle);

}  // namespace tessera::comm
