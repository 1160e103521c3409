#include "nccl/transfers.h"

#include <algorithm>
#include <string>

#include "record/record.h"

namespace fake_cuda {

void Transfers::send(Communicator& communicator, int peer, const Header& header, const void* data) {
  auto* const bytes = static_cast<std::byte*>(const_cast<void*>(data));
  add({.communicator = &communicator,
       .peer = peer,
       .sends = true,
       .header = header,
       .data = bytes});
}

void Transfers::receive(Communicator& communicator, int peer, const Header& header, void* data) {
  auto* const bytes = static_cast<std::byte*>(data);
  add({.communicator = &communicator,
       .peer = peer,
       .sends = false,
       .header = header,
       .data = bytes});
}

void Transfers::add(Transfer transfer) {
  lanes_[{transfer.communicator, transfer.peer, transfer.sends}].push_back(transfer);
}

bool Transfers::run(std::optional<std::chrono::steady_clock::time_point> deadline) {
  Backoff backoff;
  while (!lanes_.empty()) {
    if (advance()) {
      backoff.reset();
      continue;
    }
    if (aborted() || (deadline && std::chrono::steady_clock::now() > *deadline)) {
      return false;
    }
    backoff.pause();
  }
  return true;
}

bool Transfers::aborted() const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const auto& lane) { return std::get<0>(lane.first)->aborted(); });
}

/// True if anything has moved.
bool Transfers::advance() {
  bool moved = false;
  for (auto lane = lanes_.begin(); lane != lanes_.end();) {
    std::deque<Transfer>& queue = lane->second;
    while (!queue.empty() && queue.front().advance()) {
      moved = true;
      if (queue.front().ended()) {
        queue.pop_front();
      }
    }
    lane = queue.empty() ? lanes_.erase(lane) : std::next(lane);
  }
  return moved;
}

bool Transfers::Transfer::advance() {
  if (communicator->lost()) {
    return false;
  }
  const std::size_t before = moved;
  moved += move_some();
  if (!sends && before < sizeof(Header) && moved == sizeof(Header) && header_of_peer != header) {
    // NCCL would wait for ever or write wrong data; so does the fake wait, but it says why.
    count_violation("rank " + std::to_string(peer) + " of communicator " + communicator->id() +
                    " calls another collective, or one of another size");
    communicator->lose();
  }
  return moved != before;
}

/// Moves bytes of the header, or of the data behind it.
std::size_t Transfers::Transfer::move_some() {
  const bool in_header = moved < sizeof(Header);
  Header& header_bytes = sends ? header : header_of_peer;
  std::byte* const at = in_header ? reinterpret_cast<std::byte*>(&header_bytes) + moved
                                  : data + (moved - sizeof(Header));
  const std::size_t left = (in_header ? sizeof(Header) : sizeof(Header) + header.bytes) - moved;
  Mailbox& mailbox = communicator->mailbox();
  return sends ? mailbox.push(peer, at, left) : mailbox.pull(peer, at, left);
}

}  // namespace fake_cuda
