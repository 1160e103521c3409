#include "peer_launchers.h"

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <utility>

namespace tessera::run {
namespace {

// The whole of what a launcher says is one short line, which arrives at once.
constexpr std::size_t kLongest = 1024;
constexpr char kEnd = '.';

}  // namespace

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

PeerLaunchers::PeerLaunchers(std::vector<FileDescriptor> sockets) : sockets_(std::move(sockets)) {}

void PeerLaunchers::add_waits(std::vector<pollfd>& waits) const {
  for (const FileDescriptor& socket : sockets_) {
    waits.push_back({socket.get(), POLLIN, 0});
  }
}

std::optional<std::string> PeerLaunchers::failure() {
  std::optional<std::string> found;
  std::erase_if(sockets_, [&](const FileDescriptor& socket) {
    std::array<char, kLongest> text{};
    pollfd state{socket.get(), POLLIN, 0};
    if (poll(&state, 1, 0) <= 0) {
      return false;
    }
    const ssize_t size = recv(socket.get(), text.data(), text.size(), 0);
    if (size <= 0) {
      found = "the launcher of another node is gone";
    } else if (text[0] != kEnd) {
      found = std::string(text.data(), static_cast<std::size_t>(size));
    }
    return true;
  });
  return found;
}

void PeerLaunchers::tell_failure(const std::string& text) {
  tell(text.substr(0, kLongest));
}

void PeerLaunchers::tell_end() {
  tell(std::string(1, kEnd));
}

void PeerLaunchers::tell(const std::string& line) {
  for (const FileDescriptor& socket : sockets_) {
    // One that is gone needs no word.
    [[maybe_unused]] const auto sent = send(socket.get(), line.data(), line.size(), MSG_NOSIGNAL);
  }
}

}  // namespace tessera::run
