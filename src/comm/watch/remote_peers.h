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
/// separate thread calls the store, since the store may not answer. No call here takes longer than
/// a second. Thread safe.
class RemotePeers {
 public:
  explicit RemotePeers(detail::StorePtr store);
  RemotePeers(const RemotePeers&) = delete;
  RemotePeers& operator=(const RemotePeers&) = delete;
  ~RemotePeers();

  /// Reports that a rank begins no more collectives.
  void tell_left(int rank, const std::string& why);
  /// The reason that tell_left() gave for `rank`, as of a second ago; "": none.
  std::string left(int rank) const;

  /// Asks every rank what it does. Returns the number of the question; 0: the store is silent.
  std::int64_t ask();
  /// The number of the last question of any rank, as it was known a second ago.
  std::int64_t asked() const;
  void answer(std::int64_t question, int rank, const std::string& text);
  /// nullopt: no answer yet.
  std::optional<std::string> answer_of(std::int64_t question, int rank);
  /// True for the first rank of all that claims `what`, and where the store is silent.
  bool claim(const std::string& what);
  /// Reports that a rank makes progress with work on files.
  void tell_of_work();
  /// When a rank last reported that, in flight::now() of this host, as of a second ago; 0: none
  /// has.
  std::int64_t last_work() const;

 private:
  using Request = std::function<void(detail::Store&)>;
  struct State;

  static void serve(const std::shared_ptr<State>& state);
  static void look(State& state);
  /// Has the thread do this, and waits for a second at most until it has.
  void request(Request request);

  std::shared_ptr<State> state_;  ///< also of the thread, which may stay behind
};

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
