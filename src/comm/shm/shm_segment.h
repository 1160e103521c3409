#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "group_info.h"
#include "host/shared_file.h"
#include "tessera/core/detail/no_copy.h"

namespace tessera::comm {

/// A rank's call of a collective, in shared memory. The ranks compare their calls, so that
/// different calls throw instead of giving wrong results.
struct ShmCall {
  std::uint64_t sequence = 0;  ///< number of the call among the process group's calls
  std::int64_t elements = 0;
  std::int32_t kind = 0;
  std::int32_t dtype = 0;
  std::int32_t op = 0;
  std::int32_t root = 0;
  /// How many rounds this rank needs. All ranks run as many rounds as the rank that needs most.
  std::int64_t rounds = 1;
  /// The purpose that set_purpose() has given the process group: 64 characters, padded with zeros.
  std::array<char, 64> purpose{};
};

/// Memory that ranks on one machine share. Each rank has two slots (buffers), for even and odd
/// rounds. In a round, each rank fills its slot, calls arrive(), waits for all ranks, and reads all
/// slots. The memory is anonymous, so the kernel frees the memory even after a crash.
class ShmSegment : tessera::detail::NoCopy {
 public:
  /// Makes shared memory, which other ranks open by its handle(). Returns nullptr on failure.
  static std::unique_ptr<ShmSegment> create(int ranks);
  /// Maps the shared memory of another rank. Returns nullptr on failure.
  static std::unique_ptr<ShmSegment> open(const std::string& handle);

  const std::string& handle() const { return handle_; }

  std::size_t slot_bytes() const { return slot_bytes_; }
  std::byte* slot(int rank, std::uint32_t round) const;
  ShmCall& call(int rank, std::uint32_t round) const;

  /// Tells all ranks that this rank has filled its slot (buffer) for `round` (1, 2, ...).
  void arrive(int rank, std::uint32_t round) const;
  /// Waits until all ranks have called arrive() for `round`. Throws PeerError if a rank has ended.
  void wait(const GroupInfo& group, std::uint32_t round, const char* collective) const;
  /// Makes other ranks that are in wait() check immediately whether this rank is still alive.
  void wake_peers() const;

 private:
  struct Header;
  struct RankState;

  ShmSegment(SharedFile file, std::string handle);

  Header& header() const;
  RankState& state(int rank) const;
  bool arrived(std::uint32_t round) const;
  void sleep_until_arrived(std::uint32_t round, std::chrono::milliseconds most) const;
  std::vector<int> missing(const GroupInfo& group, std::uint32_t round) const;

  SharedFile file_;
  std::byte* base_;
  int ranks_;
  std::size_t slot_bytes_;
  std::string handle_;
};

}  // namespace tessera::comm
