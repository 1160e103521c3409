#include "save/background_save.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <system_error>
#include <utility>

#include "all_ranks.h"
#include "save/save_step.h"
#include "save/shard_files.h"
#include "tessera/comm/detail/rank_threads.h"
#include "tessera/comm/trace.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

/// The save of each group that the program still holds. It ends before its group does.
class SavesUnderWay {
 public:
  static SavesUnderWay& instance() {
    static SavesUnderWay saves;
    return saves;
  }

  std::shared_ptr<BackgroundSave> of(const comm::Communicator& hosts) {
    const std::lock_guard lock(mutex_);
    const auto found = saves_.find(&hosts);
    return found == saves_.end() ? nullptr : found->second.lock();
  }

  void set(const comm::Communicator& hosts, const std::shared_ptr<BackgroundSave>& save) {
    const std::lock_guard lock(mutex_);
    std::erase_if(saves_, [](const auto& entry) { return entry.second.expired(); });
    saves_[&hosts] = save;
  }

 private:
  std::mutex mutex_;
  std::map<const comm::Communicator*, std::weak_ptr<BackgroundSave>> saves_;
};

}  // namespace

BackgroundSave::BackgroundSave(comm::CommunicatorPtr hosts, PreparedSave prepared)
    : hosts_(std::move(hosts)) {
  try {
    thread_ = std::thread([this, go = go_.get_future(), prepared = std::move(prepared)]() mutable {
      if (go.get()) {
        run(std::move(prepared));
      }
    });
  } catch (const std::system_error& error) {
    fail("a save in the background can't have a thread: ", error.what(),
         ": allow the program more threads or memory, or save at once");
  }
}

void BackgroundSave::run(PreparedSave prepared) {
  const comm::CallerScope caller("checkpoint::async_save");
  comm::take_warnings_of_thread();
  try {
    save_step(*hosts_, std::move(prepared));
  } catch (...) {
    error_ = std::current_exception();
  }
  done_ = true;
}

void BackgroundSave::begin() {
  begun_ = true;
  go_.set_value(true);
}

BackgroundSave::~BackgroundSave() {
  if (!begun_) {
    go_.set_value(false);
  }
  try {
    wait_once();
  } catch (const std::exception& error) {
    TORCH_WARN("a checkpoint was not saved: ", error.what());
  }
}

void BackgroundSave::join() {
  if (thread_.joinable()) {
    thread_.join();
  }
}

void BackgroundSave::wait() {
  join();
  told_ = true;
  if (error_ != nullptr) {
    std::rethrow_exception(error_);
  }
}

void BackgroundSave::wait_once() {
  join();
  if (!told_) {
    wait();
  }
}

void end_save_under_way(comm::Communicator& hosts) {
  const std::shared_ptr<BackgroundSave> save = SavesUnderWay::instance().of(hosts);
  std::exception_ptr error;
  try {
    if (save != nullptr) {
      save->wait_once();
    }
  } catch (const comm::PeerError&) {
    throw;  // the group is broken, and all ranks know
  } catch (...) {
    error = std::current_exception();
  }
  run_or_fail_on_all(hosts, [&] {
    if (error != nullptr) {
      std::rethrow_exception(error);
    }
  });
}

std::shared_ptr<BackgroundSave> begin_save(const comm::CommunicatorPtr& hosts,
                                           PreparedSave prepared) {
  std::shared_ptr<BackgroundSave> save;
  // If a rank had no thread, the threads of the others would wait for it.
  run_or_fail_on_all(*hosts, [&] {
    copy_to_host(prepared.files);
    save = std::make_shared<BackgroundSave>(hosts, std::move(prepared));
    SavesUnderWay::instance().set(*hosts, save);
  });
  save->begin();
  return save;
}

}  // namespace tessera::checkpoint
