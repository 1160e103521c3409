// Bytes on their way between ranks.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <tuple>

#include "nccl/communicator.h"

namespace fake_cuda {

/// What both ends of a transfer must have in common.
struct Header {
  std::int32_t collective;
  std::int32_t type;
  std::int32_t op;
  std::int32_t root;
  std::uint64_t bytes;

  bool operator==(const Header&) const = default;
};

/// Sends and receives that run together. Those between one pair of ranks keep their order.
class Transfers {
 public:
  void send(Communicator& communicator, int peer, const Header& header, const void* data);
  void receive(Communicator& communicator, int peer, const Header& header, void* data);

  /// True when all have ended, false if that can't be any more or is too late.
  bool run(std::optional<std::chrono::steady_clock::time_point> deadline);

 private:
  struct Transfer {
    Communicator* communicator;
    int peer;
    bool sends;
    Header header;
    std::byte* data;
    Header header_of_peer{};
    std::size_t moved = 0;  ///< bytes moved, of the header and then the data

    bool advance();
    std::size_t move_some();
    bool ended() const { return moved == sizeof(Header) + header.bytes; }
  };
  using Lane = std::tuple<Communicator*, int, bool>;

  void add(Transfer transfer);
  bool advance();
  bool aborted() const;

  std::map<Lane, std::deque<Transfer>> lanes_;
};

}  // namespace fake_cuda
