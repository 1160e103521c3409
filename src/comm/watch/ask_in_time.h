#pragma once

#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

#include "tessera/internals/detail/c10d_store.h"

namespace tessera::comm {

/// What `question`, which is given the store, returns. A store's server, mostly the process of rank
/// 0, may be stopped, and most calls of a store have no time-out: so a thread of its own asks. It
/// may be left behind, and then no later call of the store ends either: `question` owns what it
/// uses.
template <class Question>
std::future<std::invoke_result_t<Question, detail::Store&>> ask(detail::StorePtr store,
                                                                Question question) {
  std::packaged_task<std::invoke_result_t<Question, detail::Store&>()> task(
      [store = std::move(store), question = std::move(question)] { return question(*store); });
  auto answer = task.get_future();
  std::thread(std::move(task)).detach();
  return answer;
}

}  // namespace tessera::comm
