// The name and ranks of a process group, which messages need before a Communicator exists.

#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::comm {

class GroupWatch;

/// The name, ranks and time-out of a process group, from which a back end makes a Communicator.
struct GroupInfo {
  std::string name;
  std::vector<int> ranks;  ///< the group's ranks as world ranks, in order
  int rank = 0;            ///< index of this rank in `ranks`
  std::chrono::milliseconds timeout{};
  /// Records the collectives of the process group; nullptr for one rank or in a fake world.
  std::shared_ptr<GroupWatch> watch{};
  int ranks_here = 1;  ///< number of ranks of the world on this machine

  int world_rank() const { return ranks[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(ranks.size()); }
};

/// Returns the beginning of a message: "all_gather in group 'tp' (ranks 0, 1), rank 1".
std::string describe(const GroupInfo& group, const char* collective);
/// Returns a collective's name with its purpose, if there is one: "all_gather for unit 'head'".
std::string with_purpose(const char* collective, const std::string& purpose);
/// Returns the end of the message for a collective that was called after World::shutdown().
inline constexpr auto kWorldHasEnded =
    ": the group's world has ended; make this call before World::shutdown() or ~WorldScope()";
/// Returns the FNV-1a hash of `text`, which is equal in all processes. `before`: the hash of a
/// preceding text; the result is then the hash of both texts together.
std::uint64_t hash_of(std::string_view text, std::uint64_t before = 0xcbf29ce484222325);
/// Returns a list of ranks as text: "0, 1, 5".
std::string join(const std::vector<int>& ranks);
std::vector<std::string> lines_of(const std::string& text);
/// Returns the first line of an exception's message, without libtorch's "[file:line]" prefix.
std::string first_line(const std::string& message);

}  // namespace tessera::comm
TESSERA_API_END
