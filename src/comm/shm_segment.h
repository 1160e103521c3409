#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "group_info.h"
#include "process_identity.h"

namespace tessera::comm {

/// What a rank says it is doing; ranks of a group must agree.
struct ShmCall {
  std::uint64_t sequence = 0;  ///< collectives of this group so far
  std::int64_t elements = 0;
  std::int32_t kind = 0;
  std::int32_t dtype = 0;
  std::int32_t op = 0;
  std::int32_t root = 0;
  /// How many rounds this rank needs; not compared, the largest counts.
  std::int64_t rounds = 1;
  /// What the call is for, cut to what fits; zeros after.
  std::array<char, 64> purpose{};
};

/// Memory that the ranks of a group share on one host: for each rank two slots, used in turn, and a
/// counter of rounds. A round: each rank fills its slot and arrives; once all have arrived, each
/// reads the others' slots. Since a rank arrives at a round only after it has read in the one
/// before, two slots suffice and nobody ever waits for a slot to become free.
///
/// The memory is anonymous (memfd): it ends with the last process that maps it, however that ends.
class ShmSegment {
 public:
  /// Creates one; nullopt if the kernel refuses. `handle()` tells peers how to open it.
  static std::optional<ShmSegment> create(int ranks);
  /// Opens a peer's; nullopt if it cannot be reached from here.
  static std::optional<ShmSegment> open(const std::string& handle);

  ShmSegment(ShmSegment&& other) noexcept;
  ShmSegment& operator=(ShmSegment&&) = delete;
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;
  ~ShmSegment();

  const std::string& handle() const { return handle_; }
  /// Once all ranks have opened it.
  void close_handle();
  void set_process(int rank, const ProcessIdentity& process);
  ProcessIdentity process(int rank) const;

  std::size_t slot_bytes() const { return slot_bytes_; }
  std::byte* slot(int rank, std::uint32_t round) const;
  ShmCall& call(int rank, std::uint32_t round) const;

  /// This rank has filled its slot for `round` (1, 2, ...).
  void arrive(int rank, std::uint32_t round) const;
  /// Until all ranks have arrived at `round`. Throws PeerError if one died, gave up or did not come
  /// within the time-out.
  void wait(const GroupInfo& group, std::uint32_t round, const char* collective) const;
  /// Makes the peers' wait() fail.
  void abort(int rank) const;
  std::optional<int> aborted_by() const;

 private:
  struct Header;
  struct RankState;

  ShmSegment(int fd, void* base, std::size_t bytes, int ranks, std::string handle);

  Header& header() const;
  RankState& state(int rank) const;
  bool arrived(std::uint32_t round) const;
  void sleep_until_arrived(std::uint32_t round, std::chrono::milliseconds most) const;
  void check_peers(const GroupInfo& group, std::uint32_t round, const char* collective) const;
  std::vector<int> missing(const GroupInfo& group, std::uint32_t round) const;

  int fd_ = -1;
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  int ranks_ = 0;
  std::size_t slot_bytes_ = 0;
  int spins_ = 0;
  std::string handle_;
};

}  // namespace tessera::comm
