#include "load/task_threads.h"

#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>

#include "tessera/comm/detail/work_progress.h"
#include "tessera/internals/detail/threads.h"

namespace tessera::checkpoint {
namespace {

class Tasks {
 public:
  explicit Tasks(const std::vector<std::function<void()>>& tasks) : tasks_(tasks) {}

  void run_what_is_left() {
    for (std::size_t i = next_++; i < tasks_.size(); i = next_++) {
      try {
        tasks_[i]();
      } catch (...) {
        next_ = tasks_.size();
        const std::lock_guard lock(mutex_);
        error_ = error_ == nullptr ? std::current_exception() : error_;
      }
    }
  }

  void rethrow() const {
    if (error_ != nullptr) {
      std::rethrow_exception(error_);
    }
  }

 private:
  const std::vector<std::function<void()>>& tasks_;
  std::atomic<std::size_t> next_{0};
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace

void run_on_threads(int threads, const std::vector<std::function<void()>>& tasks) {
  Tasks left(tasks);
  const tessera::detail::StateOfThread state;
  const comm::ListedThread& caller = comm::listed_thread();
  // Joins the threads, also after an exception.
  std::vector<std::jthread> others;
  try {
    while (static_cast<int>(others.size()) + 1 < threads) {
      others.emplace_back([&] {
        const tessera::detail::StateOfThreadScope guard(state);
        const comm::WorkFor for_caller(caller);
        left.run_what_is_left();
      });
    }
  } catch (const std::exception&) {
    // No thread, or no memory for it: fewer threads do the same work.
  }
  left.run_what_is_left();
  others.clear();
  left.rethrow();
}

}  // namespace tessera::checkpoint
