// Warnings of a job. The ranks need not be in step when one of them warns, so they do not
// communicate; each checks in the store whether another has shown the text.

#include "rendezvous/job_warnings.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <iostream>
#include <mutex>
#include <string>
#include <thread>
#include <typeinfo>
#include <unordered_set>

#include "tessera/comm/detail/thread_warnings.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/quiet_log.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

/// Ranks that run the same code warn at about the same time. The others wait for rank 0 for this
/// long, so that one rank shows all common warnings.
constexpr milliseconds kRankZeroFirst{500};
constexpr milliseconds kNap{10};

std::string in_one_line(std::string text) {
  for (char& c : text) {
    c = c == '\n' ? ' ' : c;
  }
  return text.substr(0, text.find_last_not_of(' ') + 1);
}

class JobWarnings final : public c10::WarningHandler {
 public:
  void set_job(const JobInfo& job) {
    const std::lock_guard lock(mutex_);
    store_ = job.store;
    rank_ = job.rank;
    size_ = job.size;
  }

  // A warning must not become an error, whatever happens here.
  void process(const c10::Warning& warning) override try {
    const std::lock_guard lock(mutex_);
    const std::string text = in_one_line(warning.msg());
    if (shown_.insert(text).second && is_first_of_job(text)) {
      // One write: lines of several ranks must not mix.
      std::cerr << detail::concat("tessera: warning: ", text, " [rank ", rank_, "]\n")
                << std::flush;
    }
  } catch (...) {
  }

 private:
  bool is_first_of_job(const std::string& text) {
    if (size_ == 1) {
      return true;
    }
    const detail::QuietLog quiet;
    const std::string key = "warning/" + std::to_string(std::hash<std::string>()(text));
    try {
      if (rank_ != 0) {
        let_rank_zero_come_first(key);
      }
      return store_->add(key, 1) == 1;
    } catch (const std::exception&) {
      return true;  // the store is gone with rank 0: better twice than never
    }
  }

  void let_rank_zero_come_first(const std::string& key) {
    const auto end = std::chrono::steady_clock::now() + kRankZeroFirst;
    while (!store_->check({key}) && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(kNap);
    }
  }

  std::mutex mutex_;
  detail::StorePtr store_;
  int rank_ = 0;
  int size_ = 1;
  std::unordered_set<std::string> shown_;
};

/// Once the process is a rank of a job.
std::atomic<JobWarnings*> handler_of_job = nullptr;

}  // namespace

void show_warnings_once(const JobInfo& job) {
  // Never destroyed: a thread may still warn while the process ends.
  static auto& handler = *new JobWarnings;
  handler.set_job(job);
  handler_of_job = &handler;
  take_warnings_of_thread();
}

void take_warnings_of_thread() {
  JobWarnings* handler = handler_of_job;
  // libtorch's default handler has exactly the base class.
  const c10::WarningHandler& now = *c10::WarningUtils::get_warning_handler();
  if (handler != nullptr && typeid(now) == typeid(c10::WarningHandler)) {
    c10::WarningUtils::set_warning_handler(handler);
  }
}

}  // namespace tessera::comm
