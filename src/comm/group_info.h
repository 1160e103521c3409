#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace tessera::comm {

/// What every communicator knows of its group, for its work and for its messages.
struct GroupInfo {
  std::string name;
  std::vector<int> ranks;  ///< world ranks in group order
  int rank = 0;            ///< of this rank within the group
  std::chrono::milliseconds timeout{};

  int size() const { return static_cast<int>(ranks.size()); }
};

/// "all_gather in group 'tp' (ranks 0, 1), rank 1": how every message about a collective begins.
std::string describe(const GroupInfo& group, const char* collective);
/// "all_gather for unit 'head'"; `purpose` may be empty.
std::string with_purpose(const char* collective, const std::string& purpose);
/// "0, 1, 5".
std::string join(const std::vector<int>& ranks);
/// The first line of a message, without libtorch's "[file:line]" prefix.
std::string first_line(const std::string& message);

}  // namespace tessera::comm
