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

/// A call of a store with a time-out; `question` is a function of the store. The process that
/// serves the store, mostly rank 0's, may be stopped, and most calls of a store have no time-out.
/// So a separate thread calls the store, unless the store is in this process. A thread without an
/// answer is abandoned, so `question` must own everything that it uses.
template <class Answer>
class StoreQuery {
 public:
  template <class Question>
  StoreQuery(detail::StorePtr store, Question question) {
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
  StoreQuery(const StoreQuery&) = delete;
  StoreQuery& operator=(const StoreQuery&) = delete;
  ~StoreQuery() {
    if (thread_.joinable()) {
      has_answer_ ? thread_.join() : thread_.detach();
    }
  }

  /// Whether the answer arrives within `time`.
  bool wait_for(std::chrono::microseconds time) {
    has_answer_ = has_answer_ || answer_.wait_for(time) == std::future_status::ready;
    return has_answer_;
  }
  /// The answer; may be called once. Throws what `question` throws.
  Answer get() { return answer_.get(); }

 private:
  std::future<Answer> answer_;
  std::thread thread_;
  bool has_answer_ = false;
};

template <class Question>
StoreQuery<std::invoke_result_t<Question, detail::Store&>> query(detail::StorePtr store,
                                                                 Question question) {
  return {std::move(store), std::move(question)};
}

}  // namespace tessera::comm

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// Returns when all ranks of a group have called this. No other call uses `store`. The set-up of a
/// back end begins only afterwards, because a back end would wait for a dead rank until the
/// time-out. Throws PeerError as PeerWait does.
void meet(const detail::StorePtr& store, const GroupInfo& group);

/// True if every rank of the world calls this within 2 s, each in one group. All ranks get the same
/// answer. `world`: the store of all ranks. `own`: the store of this call of this group. `meeting`:
/// the prefix of the keys in `world`; for a group, its first rank's prefix is used. Throws
/// PeerError as PeerWait does.
bool all_come_at_once(const detail::StorePtr& world, const detail::StorePtr& own,
                      const GroupInfo& group, int world_size, const std::string& meeting);

/// Sets a key. Throws PeerError as PeerWait does.
void tell(const detail::StorePtr& store, const GroupInfo& group, const std::string& key,
          const std::string& value);

/// Waits for a key that rank `from` of the group sets, and returns its value. Throws PeerError as
/// PeerWait does.
std::string value_from(const detail::StorePtr& store, const GroupInfo& group, int from,
                       const std::string& key);

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
