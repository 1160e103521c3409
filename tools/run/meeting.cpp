#include "meeting.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iostream>
#include <optional>
#include <sstream>
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
constexpr auto kNap = 100ms;
// A launcher identifies itself at once; a silent client is none.
constexpr auto kHello = 2s;
constexpr std::size_t kLongestWord = 4096;
constexpr auto kWelcome = "welcome";

// The time until which the others may come; one line says so.
class Wait {
 public:
  explicit Wait(const Options& options) : seconds_(options.join_timeout.count()) {}

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
  Clock::time_point begin_ = Clock::now();
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
  const std::string least =
      options.min_nodes == options.nnodes ? "" : std::to_string(options.min_nodes) + ":";
  return "--nnodes " + least + std::to_string(options.nnodes) + " --nproc " +
         std::to_string(options.nproc);
}

std::string number_line(const Options& options) {
  return options.is_numbered ? "--node-rank " + std::to_string(options.node_rank) : "any number";
}

// Another launcher, at node 0.
struct Node {
  FileDescriptor socket;
  std::string number;
};

[[noreturn]] void refuse(const Node& node, const std::string& fault) {
  write_line(node.socket.get(), fault);
  fail(fault);
}

// Without a socket for a connection that is not from a launcher of this job.
Node accept_node(int listener, const Options& options) {
  Node node{FileDescriptor(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC)), ""};
  const int socket = node.socket.get();
  if (!node.socket || read_line(socket, Clock::now() + kHello) != job_line(options)) {
    return {};
  }
  const auto size = read_line(socket, Clock::now() + kHello);
  const auto number = read_line(socket, Clock::now() + kHello);
  if (size != size_line(options)) {
    refuse(node, "one node has " + size.value_or("nothing") + ", and node 0 has " +
                     size_line(options) + ": start all with the same");
  }
  write_line(socket, kWelcome);
  node.number = number.value_or("");
  return node;
}

// One whose launcher has ended meanwhile is none.
bool is_gone(const Node& node) {
  pollfd state{node.socket.get(), POLLIN | POLLRDHUP, 0};
  return poll(&state, 1, 0) > 0;
}

// The others, once they are enough.
std::vector<Node> gather_nodes(int listener, const Options& options) {
  Wait wait(options);
  std::vector<Node> nodes;
  constexpr auto kNever = Clock::time_point::max();
  Clock::time_point last_call = kNever;  // its end, once they are enough
  const auto here = [&] { return static_cast<int>(nodes.size()) + 1; };
  while (here() < options.nnodes && Clock::now() < last_call) {
    const std::string came =
        std::to_string(here()) + " of " + std::to_string(options.nnodes) + " nodes";
    wait.tell(came + " are at " + place_of(options));
    TESSERA_CHECK(last_call != kNever || !wait.is_over(), came, " came to ", place_of(options),
                  " within ", wait.seconds(),
                  " s: start the others with the same --rdzv-endpoint and --rdzv-id");
    if (wait_for(listener, POLLIN, Clock::now() + kNap)) {
      if (Node node = accept_node(listener, options); node.socket) {
        nodes.push_back(std::move(node));
      }
    }
    std::erase_if(nodes, is_gone);
    if (here() < options.min_nodes) {
      last_call = kNever;
    } else if (last_call == kNever) {
      last_call = Clock::now() + std::chrono::ceil<Clock::duration>(options.last_call);
    }
  }
  return nodes;
}

// In the order of their given numbers; those without one stay in that in which they came.
void sort_by_number(std::vector<Node>& nodes, const Options& options) {
  const auto number_of = [](const Node& node) {
    const std::size_t space = node.number.rfind(' ');
    return node.number.starts_with("--node-rank ") ? std::stoi(node.number.substr(space)) : 0;
  };
  std::ranges::stable_sort(nodes, {}, number_of);
  std::string before = number_line(options);
  for (const Node& node : nodes) {
    if (node.number.starts_with("--") && node.number == before) {
      refuse(node, "two nodes have " + before + ": give each another");
    }
    before = node.number;
  }
}

Meeting number_nodes(FileDescriptor listener, const Options& options, int round) {
  std::vector<Node> nodes = gather_nodes(listener.get(), options);
  sort_by_number(nodes, options);
  const int count = static_cast<int>(nodes.size()) + 1;
  for (int i = 1; i < count; ++i) {
    write_line(nodes[static_cast<std::size_t>(i) - 1].socket.get(),
               std::to_string(i) + " " + std::to_string(count) + " " + std::to_string(round));
  }
  Meeting meeting{count, 0, round, std::move(listener), {}};
  for (Node& node : nodes) {
    meeting.peers.push_back(std::move(node.socket));
  }
  return meeting;
}

// Empty where no launcher listens yet, or its host is not known yet.
FileDescriptor connect_to(const Options& options, Clock::time_point end) {
  if (!why_unknown(options.host).empty()) {
    return {};
  }
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

// nullopt where node 0 has no answer: it may have ended, or its job not yet.
std::optional<std::string> ask_node_zero(int node, const Options& options, const Wait& wait) {
  write_line(node, job_line(options));
  write_line(node, size_line(options));
  write_line(node, number_line(options));
  // The store of a start that has not ended yet says something else, or nothing.
  auto answer = read_line(node, Clock::now() + kHello);
  return answer == kWelcome ? read_line(node, wait.end()) : answer;
}

// `connected`: something that listens there has not answered.
[[noreturn]] void fail_without_node_zero(const Options& options, const Wait& wait, bool connected) {
  const std::string unknown = why_unknown(options.host);
  fail("no node 0 answered at ", place_of(options), " within ", wait.seconds(), " s: ",
       !unknown.empty() ? "the host " + options.host + " of --rdzv cannot be resolved: " + unknown
       : connected
           ? "a job that already runs there did not begin again, or one with another --rdzv-id is "
             "there: wait longer with --rdzv-conf join_timeout=S, or give this job another port"
           : "start tessera-run on that host too, with the same --rdzv-id");
}

Meeting ask_for_number(const Options& options) {
  Wait wait(options);
  bool connected = false;
  while (!wait.is_over()) {
    wait.tell("waits for node 0 at " + place_of(options));
    FileDescriptor node = connect_to(options, wait.end());
    connected = static_cast<bool>(node);
    if (connected) {
      if (const auto answer = ask_node_zero(node.get(), options, wait)) {
        Meeting meeting;
        std::istringstream numbers(*answer);
        const auto are_numbers =
            static_cast<bool>(numbers >> meeting.node_rank >> meeting.nnodes >> meeting.round);
        TESSERA_CHECK(are_numbers, *answer);
        meeting.peers.push_back(std::move(node));
        return meeting;
      }
    }
    std::this_thread::sleep_for(kNap);
  }
  fail_without_node_zero(options, wait, connected);
}

}  // namespace

bool meets(const Options& options) {
  return !options.is_numbered ||
         (options.nnodes > 1 && (options.restarts > 0 || options.min_nodes < options.nnodes));
}

Meeting meet(const Options& options, int round) {
  const bool may_be_zero = !options.is_numbered || options.node_rank == 0;
  if (FileDescriptor listener = may_be_zero ? try_listen(options) : FileDescriptor()) {
    return number_nodes(std::move(listener), options, round);
  }
  if (options.is_numbered && options.node_rank == 0) {
    fail_to_listen(options);
  }
  return ask_for_number(options);
}

}  // namespace tessera::run
