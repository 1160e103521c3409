#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "tessera/export.h"
#include "tessera/internals/detail/c10d.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// Messages between ranks on different hosts, through a separate connection to the job's store. A
/// separate thread calls the store, since the store may not answer. No function here blocks longer
/// than a second. Thread safe.
class RemotePeers {
 public:
  explicit RemotePeers(detail::StorePtr store);
  RemotePeers(const RemotePeers&) = delete;
  RemotePeers& operator=(const RemotePeers&) = delete;
  ~RemotePeers();

  /// Reports that a rank begins no more collectives.
  void tell_left(int rank, const std::string& why);
  /// The reason that tell_left() gave for `rank`, up to a second old; "" if there is none.
  std::string left(int rank) const;

  /// Requests the activity of every rank. Returns the number of the question; 0 if the store does
  /// not answer.
  std::int64_t ask();
  /// The number of the last question of any rank, up to a second old.
  std::int64_t asked() const;
  void answer(std::int64_t question, int rank, const std::string& text);
  /// The answer of `rank`; nullopt if there is none yet.
  std::optional<std::string> answer_of(std::int64_t question, int rank);
  /// True for the first of all ranks that claims `what`, and if the store does not answer.
  bool claim(const std::string& what);
  /// Reports that a rank makes progress with files.
  void tell_of_work();
  /// The time of the last such report of any rank, in flight::now() of this host, up to a second
  /// old; 0 if there is none.
  std::int64_t last_work() const;

 private:
  using Request = std::function<void(detail::Store&)>;
  struct State;

  static void serve(const std::shared_ptr<State>& state);
  static void look(State& state);
  /// Passes a request to the thread and waits at most a second until it is done.
  void request(Request request);

  std::shared_ptr<State> state_;  ///< shared with the thread, which may be abandoned
};

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
