#include <algorithm>
#include <chrono>
#include <iostream>
#include <thread>

#include "group_info.h"
#include "host/host.h"
#include "host/shared_file.h"
#include "rendezvous/rendezvous_wait.h"
#include "tessera/comm/communicator.h"
#include "tessera/core/detail/flight_record.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

std::string arrival_key(int rank) {
  return "host/" + std::to_string(rank);
}

/// The key in the store for the message of an error that makes all ranks throw. The rank that
/// detects the error writes the message.
constexpr auto kFaultKey = "fault";

/// The lines of the text with which a rank announces itself in the store: the number of ranks,
/// host_identity(), and the handle (handle_of_file()) of the rank's flight record.
enum Field : std::size_t { kSize, kHost, kHandle };

class Arrivals {
 public:
  Arrivals(detail::Store& store, const JobVariables& job, const RecordPtr& own)
      : store_(store), job_(job), arrivals_(static_cast<std::size_t>(job.size)) {
    arrivals_[static_cast<std::size_t>(job.rank)] = {host_identity(), own};
    for (int rank = 0; rank < job.size; ++rank) {
      opened_keys_.push_back("opened/" + std::to_string(rank));
      if (rank != job.rank) {
        missing_.push_back(rank);
      }
    }
    // After a change of nodes, torchrun starts the ranks again with the same store and restart
    // count.
    if (!job.agent_store && store_.add("joined/" + std::to_string(job.rank), 1) > 1) {
      refuse_second_process();
    }
    store_.set(arrival_key(job.rank),
               detail::concat(job.size, '\n', own_host(), '\n', handle_of_file(own->fd)));
  }

  /// Reads the store. Returns the ranks that have not announced themselves. After all ranks have
  /// announced themselves: the first rank that has not opened all flight records, or none.
  const std::vector<int>& look() {
    std::string fault;
    try {
      ask_for_all();
      if (!missing_.empty() && store_.check({kFaultKey})) {
        fault = store_.get_to_str(kFaultKey);
      }
    } catch (const std::exception& error) {
      wait_for_first_failure();
      throw PeerError(detail::concat(
          "rank ", job_.rank, " of ", job_.size, " lost the connection to the store at ",
          job_.address, ":", job_.port, " at the rendezvous; rank(s) ", join(missing_),
          " did not join: ", first_line(error.what()), "; look for rank 0's error"));
    }
    TESSERA_CHECK(fault.empty(), fault);
    return missing_;
  }

  void check_that_all_live() {
    for (const Arrival& arrival : arrivals_) {
      if (arrival.record != nullptr) {
        const flight::Record& record = *arrival.record;
        // An ended rank is no error if no rank is missing: the rank ended after the rendezvous.
        if (!is_alive({record.pid, record.start_time}) && !look().empty()) {
          wait_for_first_failure();
          throw PeerError(detail::concat(
              "rank ", job_.rank, " of ", job_.size, " waits at the rendezvous, but rank ",
              record.rank, " (pid ", record.pid, ") has ended; look for that rank's error"));
        }
      }
    }
  }

  std::vector<Arrival> take() { return std::move(arrivals_); }

 private:
  void ask_for_all() {
    std::vector<int> missing;
    for (int rank = 0; rank < job_.size; ++rank) {
      Arrival& arrival = arrivals_[static_cast<std::size_t>(rank)];
      if (arrival.host.empty() && store_.check({arrival_key(rank)})) {
        arrival = take_in(rank, lines_of(store_.get_to_str(arrival_key(rank))));
      }
      if (arrival.host.empty()) {
        missing.push_back(rank);
      }
    }
    missing_ = missing.empty() ? first_not_ready() : std::move(missing);
  }

  /// Announces once that this rank has opened all flight records. Returns the first rank without
  /// this announcement, or none. Ranks wait here: an ended process's record cannot be opened.
  std::vector<int> first_not_ready() {
    if (!announced_open_) {
      store_.set(opened_keys_[static_cast<std::size_t>(job_.rank)], "");
      announced_open_ = true;
    }
    if (store_.check({opened_keys_.begin() + next_to_open_, opened_keys_.end()})) {
      return {};
    }
    while (next_to_open_ < job_.size &&
           store_.check({opened_keys_[static_cast<std::size_t>(next_to_open_)]})) {
      ++next_to_open_;
    }
    return next_to_open_ < job_.size ? std::vector<int>{next_to_open_} : std::vector<int>{};
  }

  /// Throws Error because another process has joined as this rank. The other ranks that wait read
  /// the error from the store.
  [[noreturn]] void refuse_second_process() {
    const std::string key = arrival_key(job_.rank);
    const std::string size = store_.check({key}) ? lines_of(store_.get_to_str(key)).at(kSize)
                                                 : std::to_string(job_.size);
    std::string fault = fault_of_size(job_.rank, size);
    if (fault.empty()) {
      fault = detail::concat("two processes have joined the rendezvous at ", job_.address, ":",
                             job_.port, " as rank ", job_.rank, " of ", job_.size,
                             "; start each process with its own rank, and each job, also after a "
                             "restart, with its own MASTER_PORT");
    }
    store_.set(kFaultKey, fault);
    fail(fault);
  }

  /// Returns an error message if another process has announced another number of ranks, or "".
  std::string fault_of_size(int rank, const std::string& size) const {
    return size == std::to_string(job_.size)
               ? ""
               : detail::concat("rank ", job_.rank, " of ", job_.size, " met rank ", rank, " of ",
                                size, " at ", job_.address, ":", job_.port,
                                "; start all nodes with equal numbers of nodes and of ranks per "
                                "node");
  }

  Arrival take_in(int rank, const std::vector<std::string>& announced) {
    if (const std::string fault = fault_of_size(rank, announced.at(kSize)); !fault.empty()) {
      // The other ranks read the error from the store, so that they do not wait for ranks that do
      // not exist.
      store_.set(kFaultKey, fault);
      return {};
    }
    const std::string& host = announced.at(kHost);
    return {host, host == own_host() ? open_record(announced.at(kHandle)) : nullptr};
  }

  const std::string& own_host() const {
    return arrivals_[static_cast<std::size_t>(job_.rank)].host;
  }

  detail::Store& store_;
  const JobVariables& job_;
  std::vector<Arrival> arrivals_;
  /// Element r: the key in the store that rank r sets when it has opened all flight records.
  std::vector<std::string> opened_keys_;
  /// The first rank that has not opened all flight records. Earlier ranks are not asked again, so
  /// that the store gets few requests.
  int next_to_open_ = 0;
  bool announced_open_ = false;  ///< whether this rank has set its opened key
  std::vector<int> missing_;
};

}  // namespace

void say_wait(const JobVariables& job, const WorldOptions& options,
              std::chrono::milliseconds waited, const std::vector<int>& missing, bool& said) {
  constexpr std::chrono::milliseconds kFirst{3000};
  if (said || job.local_rank.value_or(job.rank) != 0 || options.watchdog.count() == 0 ||
      waited < std::min(kFirst, options.watchdog)) {
    return;
  }
  said = true;
  std::cerr << detail::concat("tessera: rank ", job.rank, " waits for ",
                              missing.empty()
                                  ? "the store"
                                  : detail::concat(flight::name_ranks(missing), " of ", job.size),
                              " at ", job.address, ":", job.port, ", as ", job.launcher, " say\n")
            << std::flush;
}

std::vector<Arrival> await_all_ranks(detail::Store& store, const JobVariables& job,
                                     const WorldOptions& options, const RecordPtr& own) {
  constexpr std::chrono::milliseconds kLongestNap{100};
  const auto begun = Clock::now();
  Arrivals arrivals(store, job, own);
  std::chrono::milliseconds nap{1};
  bool said = false;
  for (std::vector<int> missing = arrivals.look(); !missing.empty(); missing = arrivals.look()) {
    arrivals.check_that_all_live();
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begun);
    TESSERA_CHECK(waited < options.timeout, "rank ", job.rank, " of ", job.size, " waited ",
                  options.timeout.count(), " ms at the rendezvous, and rank(s) ", join(missing),
                  " did not join; start all ranks with the same MASTER_ADDR, MASTER_PORT and "
                  "number of ranks; the number of ranks comes from ",
                  job.launcher);
    say_wait(job, options, waited, missing, said);
    std::this_thread::sleep_for(nap);
    nap = std::min(2 * nap, kLongestNap);
  }
  return arrivals.take();
}

}  // namespace tessera::comm
