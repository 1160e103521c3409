#include "node_numbers.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "rendezvous.h"
#include "tessera/core/error.h"

namespace tessera::run {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kQuiet = 3s;
// A launcher identifies itself at once; a silent client is none.
constexpr auto kHello = 2s;
constexpr std::size_t kLongestWord = 4096;

// The time until which the others may come; one line says so.
class Wait {
 public:
  explicit Wait(const Options& options) : begin_(Clock::now()) {
    const char* variable = std::getenv("TESSERA_TIMEOUT");
    const std::string text = !options.timeout.empty() ? options.timeout
                             : variable != nullptr    ? variable
                                                      : "600";
    seconds_ = std::strtod(text.c_str(), nullptr);
  }

  double seconds() const { return seconds_; }
  Clock::time_point end() const {
    return begin_ + std::chrono::ceil<Clock::duration>(std::chrono::duration<double>(seconds_));
  }
  bool is_over() const { return Clock::now() >= end(); }
  void tell(const std::string& text) {
    if (!told_ && Clock::now() - begin_ > kQuiet) {
      std::cerr << "tessera-run: " << text << '\n';
      told_ = true;
    }
  }

 private:
  Clock::time_point begin_;
  double seconds_ = 0;
  bool told_ = false;
};

std::string place_of(const Options& options) {
  return options.host + ":" + std::to_string(options.port);
}

bool wait_for(int fd, short events, Clock::time_point end) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
  pollfd ready{fd, events, 0};
  return poll(&ready, 1, static_cast<int>(std::max<decltype(left)>(left, 0))) > 0;
}

// nullopt where the other side closes, or says nothing in time.
std::optional<std::string> read_line(int fd, Clock::time_point end) {
  std::string line;
  char c = 0;
  while (line.size() < kLongestWord && wait_for(fd, POLLIN, end) && read(fd, &c, 1) == 1) {
    if (c == '\n') {
      return line;
    }
    line += c;
  }
  return std::nullopt;
}

void write_line(int fd, const std::string& line) {
  const std::string text = line + "\n";
  // One that has gone is missed by the ranks, too.
  [[maybe_unused]] const auto sent = send(fd, text.data(), text.size(), MSG_NOSIGNAL);
}

// What all launchers of a job must have alike. Others at the same place belong to another job.
std::string job_line(const Options& options) {
  return "tessera-run " + options.job_id;
}

std::string size_line(const Options& options) {
  return "--nnodes " + std::to_string(options.nnodes) + " --nproc " + std::to_string(options.nproc);
}

// Empty for a connection that is not from a launcher of this job.
FileDescriptor accept_node(int listener, const Options& options) {
  FileDescriptor node(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  if (!node || read_line(node.get(), Clock::now() + kHello) != job_line(options)) {
    return {};
  }
  const auto size = read_line(node.get(), Clock::now() + kHello);
  if (size != size_line(options)) {
    const std::string fault = "one node has " + size.value_or("nothing") + ", and node 0 has " +
                              size_line(options) + ": start all with the same";
    write_line(node.get(), fault);
    fail(fault);
  }
  return node;
}

void number_others(int listener, const Options& options, Wait wait) {
  std::vector<FileDescriptor> nodes;
  while (static_cast<int>(nodes.size()) + 1 < options.nnodes) {
    const std::string came =
        std::to_string(nodes.size() + 1) + " of " + std::to_string(options.nnodes) + " nodes";
    wait.tell(came + " are at " + place_of(options));
    TESSERA_CHECK(!wait.is_over(), came, " came to ", place_of(options), " within ", wait.seconds(),
                  " s: start the others with the same --rdzv-endpoint and --rdzv-id");
    if (wait_for(listener, POLLIN, std::min(wait.end(), Clock::now() + 500ms))) {
      if (FileDescriptor node = accept_node(listener, options)) {
        nodes.push_back(std::move(node));
      }
    }
  }
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    write_line(nodes[i].get(), std::to_string(i + 1));
  }
}

// Empty where no launcher listens yet.
FileDescriptor connect_to(const Options& options, Clock::time_point end) {
  const auto addresses = find_addresses(options);
  for (const auto* a = addresses.get(); a != nullptr; a = a->ai_next) {
    FileDescriptor socket(::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    int error = connect(socket.get(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS &&
        wait_for(socket.get(), POLLOUT, std::min(end, Clock::now() + kQuiet))) {
      socklen_t size = sizeof error;
      getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error == 0) {
      fcntl(socket.get(), F_SETFL, 0);
      return socket;
    }
  }
  return {};
}

int ask_for_number(const Options& options, Wait wait) {
  while (!wait.is_over()) {
    wait.tell("waits for node 0 at " + place_of(options));
    if (const FileDescriptor node = connect_to(options, wait.end())) {
      write_line(node.get(), job_line(options));
      write_line(node.get(), size_line(options));
      if (const auto answer = read_line(node.get(), wait.end())) {
        const bool is_number = answer->find_first_not_of("0123456789") == std::string::npos;
        TESSERA_CHECK(is_number && !answer->empty(), *answer);
        return std::stoi(*answer);
      }
    }
    std::this_thread::sleep_for(100ms);
  }
  fail("no node 0 answered at ", place_of(options), " within ", wait.seconds(),
       " s: start tessera-run on that host too, with the same --rdzv-id");
}

}  // namespace

NodeNumber agree_on_number(const Options& options) {
  if (FileDescriptor listener = try_listen(options)) {
    number_others(listener.get(), options, Wait(options));
    return {0, std::move(listener)};
  }
  return {ask_for_number(options, Wait(options)), {}};
}

}  // namespace tessera::run
