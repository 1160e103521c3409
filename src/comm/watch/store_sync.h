#pragma once

#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "group_info.h"
#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"

namespace tessera::comm {

/// The answer to `question`, a function of the store. The process that serves the store, usually
/// that of rank 0, may be stopped, and most calls of a store have no time-out. So a separate thread
/// calls the store, unless the store is in this process. If the caller gives up waiting, the thread
/// is abandoned, so `question` must own everything that it uses.
template <class Question>
auto ask(detail::StorePtr store, Question question) {
  const bool in_memory = detail::is_in_memory(store);
  std::packaged_task<std::invoke_result_t<Question, detail::Store&>()> task(
      [store = std::move(store), question = std::move(question)]() mutable {
        const detail::QuietLog quiet;
        return question(*store);
      });
  auto answer = task.get_future();
  if (in_memory) {
    task();
  } else {
    // The answer is ready only after the thread's copy of the task is destroyed.
    std::thread([task = std::move(task)]() mutable { task.make_ready_at_thread_exit(); }).detach();
  }
  return answer;
}

/// Whether an answer of ask() arrives within `time`.
template <class Answer>
bool arrives(const std::future<Answer>& answer, std::chrono::microseconds time) {
  return answer.wait_for(time) == std::future_status::ready;
}

}  // namespace tessera::comm

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// Returns when all ranks of a group have called meet(). No other call may use `store`. To be
/// called before the set-up of a back end, which would wait for a dead rank until the time-out.
/// Throws PeerError as PeerWait does.
void meet(const detail::StorePtr& store, const GroupInfo& group);

/// True if every rank of the world calls this function within 2 s, each rank for one group. All
/// ranks get the same answer. `world`: the store of all ranks. `own`: a store that only this call
/// of this group uses. `meeting`: the prefix of the keys in `world`; for a group, its first rank's
/// prefix is used. Throws PeerError as PeerWait does.
bool all_come_at_once(const detail::StorePtr& world, const detail::StorePtr& own,
                      const GroupInfo& group, int world_size, const std::string& meeting);

/// Sets a key of the store. Throws PeerError as PeerWait does.
void tell(const detail::StorePtr& store, const GroupInfo& group, const std::string& key,
          const std::string& value);

/// Waits until rank `from` of the group sets `key`, and returns the value of the key. Throws
/// PeerError as PeerWait does.
std::string value_from(const detail::StorePtr& store, const GroupInfo& group, int from,
                       const std::string& key);

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
