#pragma once

#include <atomic>
#include <exception>
#include <future>
#include <memory>
#include <thread>

#include "save/prepare_save.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

/// A save on a separate thread. Thread safety: one thread at a time.
class BackgroundSave {
 public:
  /// Makes the thread, which waits for begin(). Throws Error where there can be none.
  BackgroundSave(comm::CommunicatorPtr hosts, PreparedSave prepared);
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;
  /// Waits; saves nothing if it has not begun. An error that was never thrown becomes a warning.
  ~BackgroundSave();

  /// Once, when the threads of all ranks are there.
  void begin();
  bool done() const { return done_; }
  /// Waits; throws what the save has thrown.
  void wait();
  /// The same, but throws nothing a second time.
  void wait_once();

 private:
  void join();
  void run(PreparedSave prepared);

  comm::CommunicatorPtr hosts_;
  std::exception_ptr error_;
  bool told_ = false;
  std::atomic<bool> done_{false};
  bool begun_ = false;
  std::promise<bool> go_;  ///< whether to save
  std::thread thread_;
};

/// Waits for the save under way on this group, so that the group is free. Its error, unless every
/// rank has thrown it already, is thrown on all. Collective over `hosts`.
void end_save_under_way(comm::Communicator& hosts);

/// Copies the state to the hosts' memory and begins to save the copy. The group is in use until the
/// save has ended. Collective over `hosts`. Throws Error on all ranks if it can't begin on one.
std::shared_ptr<BackgroundSave> begin_save(const comm::CommunicatorPtr& hosts,
                                           PreparedSave prepared);

}  // namespace tessera::checkpoint
