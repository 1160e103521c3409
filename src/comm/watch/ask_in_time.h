#pragma once

#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

#include "tessera/internals/detail/c10d_store.h"

namespace tessera::comm {

/// With one call of a store.
constexpr std::chrono::milliseconds kStorePatience{1000};

/// What `ask` makes of a store, or nullopt if that takes longer than `patience`: the store's
/// server, mostly the process of rank 0, may be stopped, and most calls of a store have no
/// time-out. The thread that asks is then left behind: `ask` owns what it uses. Throws what `ask`
/// throws.
template <class Ask>
std::optional<std::invoke_result_t<Ask, detail::Store&>> ask_in_time(
    detail::StorePtr store, std::chrono::milliseconds patience, Ask ask) {
  std::packaged_task<std::invoke_result_t<Ask, detail::Store&>()> task(
      [store = std::move(store), ask = std::move(ask)] { return ask(*store); });
  auto answer = task.get_future();
  std::thread(std::move(task)).detach();
  if (answer.wait_for(patience) != std::future_status::ready) {
    return std::nullopt;
  }
  return answer.get();
}

}  // namespace tessera::comm
