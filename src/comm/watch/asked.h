#pragma once

#include <chrono>
#include <future>
#include <thread>
#include <type_traits>
#include <utility>

#include "tessera/internals/detail/c10d.h"

namespace tessera::comm {

/// The answer of a store to `question`, a function of the store. A store's server, mostly the
/// process of rank 0, may be stopped, and most calls of a store have no time-out. So a separate
/// thread asks, unless the store is in this process. A thread without an answer is left behind:
/// `question` owns what it uses. No later call of that store ends either.
template <class Answer>
class Asked {
 public:
  template <class Question>
  Asked(detail::StorePtr store, Question question) {
    const bool in_memory = detail::is_in_memory(store);
    std::packaged_task<Answer()> task(
        [store = std::move(store), question = std::move(question)] { return question(*store); });
    answer_ = task.get_future();
    if (in_memory) {
      task();
    } else {
      thread_ = std::thread(std::move(task));
    }
  }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;
  ~Asked() {
    if (thread_.joinable()) {
      has_answer_ ? thread_.join() : thread_.detach();
    }
  }

  /// Whether the answer comes within `time`.
  bool wait_for(std::chrono::microseconds time) {
    has_answer_ = has_answer_ || answer_.wait_for(time) == std::future_status::ready;
    return has_answer_;
  }
  /// Once. Throws what `question` throws.
  Answer get() { return answer_.get(); }

 private:
  std::future<Answer> answer_;
  std::thread thread_;
  bool has_answer_ = false;
};

template <class Question>
Asked<std::invoke_result_t<Question, detail::Store&>> ask(detail::StorePtr store,
                                                          Question question) {
  return {std::move(store), std::move(question)};
}

}  // namespace tessera::comm
