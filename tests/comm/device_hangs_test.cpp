// Tests collectives that run on a device, as with NCCL. The host does not wait for such a
// collective, so the watchdog must end a process whose device hangs.
#include <ATen/ops/zeros.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "checked/checked_communicator.h"
#include "tessera/comm/detail/scopes.h"
#include "tessera/comm/trace.h"
#include "testing/errors.h"
#include "testing/files.h"
#include "testing/processes.h"
#include "watch/watch.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;

using Progress = std::function<bool()>;
/// Starts a device collective. Returns a function that tells whether the collective has ended.
using Begin = std::function<Progress()>;

/// A device collective: wait() returns at once, although the collective still runs on the device.
class DeviceCall final : public Work {
 public:
  explicit DeviceCall(Progress progress) : progress_(std::move(progress)) {}
  void wait() override {}
  std::function<bool()> device_progress() override { return progress_; }

 private:
  Progress progress_;
};

class Device final : public Communicator {
 public:
  explicit Device(Begin begin) : Communicator(/*rank=*/0, /*size=*/2), begin_(std::move(begin)) {}
  std::string name() const override { return "device"; }
  bool keeps_order_on_device() const override { return true; }
  WorkPtr all_reduce(const at::Tensor&, ReduceOp) override {
    return std::make_shared<DeviceCall>(begin_());
  }

 private:
  Begin begin_;
};

/// A world of two ranks in which only rank 0 exists, with a process group on a simulated device.
struct TwoRanks {
  explicit TwoRanks(Begin begin, milliseconds limit = milliseconds(500),
                    milliseconds timeout = milliseconds(2500)) {
    WatchSettings settings{0, 0, limit, timeout};
    const std::string folder = std::getenv("TESSERA_RUN_DIR");
    std::vector<RecordPtr> records = {make_record(settings, 2, folder)};
    settings.rank = 1;
    records.push_back(make_record(settings, 2, folder));
    settings.rank = 0;
    world = std::make_shared<WorldWatch>(settings, records, nullptr);
    const std::vector<int> ranks = {0, 1};
    const auto watch = std::make_shared<GroupWatch>(world, "dp", ranks);
    watch->leaves(watch->begin("set-up"));
    group = make_checked_communicator(std::make_shared<Device>(std::move(begin)),
                                      {"dp", ranks, 0, timeout, watch},
                                      std::make_shared<TrafficCounter>());
  }

  void call() const {
    const PurposeScope purpose(*group, "unit 'head'");
    group->all_reduce(at::zeros({4}), ReduceOp::kSum)->wait();
  }
  void call_and_wait() const {
    call();
    std::this_thread::sleep_for(std::chrono::seconds(20));
  }

  WorldWatchPtr world;
  CommunicatorPtr group;
};

Progress never() {
  return [] { return false; };
}

TEST(DISABLED_DeviceHangs, TheDeviceIsStuck) {
  TwoRanks(never).call_and_wait();
}

/// Each of the four collectives takes half of the time-out, so all four take twice the time-out.
TEST(DISABLED_DeviceHangs, TheDeviceIsBusy) {
  using Clock = std::chrono::steady_clock;
  constexpr milliseconds kOneCall{600};
  Clock::time_point end = Clock::now();
  const Begin one_after_another = [&end, kOneCall] {
    end += kOneCall;
    return [at = end] { return Clock::now() >= at; };
  };
  const TwoRanks ranks(one_after_another, milliseconds(0), 2 * kOneCall);
  for (int i = 0; i < 4; ++i) {
    ranks.call();
  }
  std::this_thread::sleep_for(5 * kOneCall);
}

/// The watchdog destroys a collective's Progress function, whose destructor calls the watchdog.
/// This must not deadlock. When the world ends, one collective has ended and another still runs.
TEST(DISABLED_DeviceHangs, DestroyedCallCallsTheWatchdog) {
  WorldWatch* world = nullptr;
  bool done = true;
  int released = 0;
  const TwoRanks ranks([&] {
    const std::shared_ptr<void> held(nullptr, [&](void*) {
      world->await_device([] { return true; }, {});
      ++released;
    });
    return [held, done] { return done; };
  });
  world = ranks.world.get();
  ranks.call();
  std::this_thread::sleep_for(milliseconds(600));
  done = false;
  ranks.call();
  ranks.world->end();
  EXPECT_EQ(released, 2);
}

/// One collective waits for three device operations, one after another, each with its own time-out.
TEST(DISABLED_DeviceHangs, CallWaitsForSeveralDeviceOperations) {
  constexpr milliseconds kTimeout{600};
  const TwoRanks ranks(never, milliseconds(0), kTimeout);
  GroupWatch watch(ranks.world, "tp", {0, 1});
  const BegunCall call = watch.begin("set-up");
  for (int i = 0; i < 3; ++i) {
    const auto running = std::make_shared<int>();
    ranks.world->await_device([weak = std::weak_ptr<int>(running)] { return weak.expired(); },
                              call);
    std::this_thread::sleep_for(kTimeout / 2);
  }
  std::this_thread::sleep_for(2 * kTimeout);
}

struct Case {
  const char* body;
  int exit_code;
  std::vector<const char*> words;

  friend void PrintTo(const Case& one, std::ostream* out) { *out << one.body; }
};

class DeviceHangs : public ::testing::TestWithParam<Case> {};

// Lost collectives, NCCL errors and hanging NCCL initializations are tested in tests/examples/cuda.
TEST_P(DeviceHangs, EndTheProcessAfterTheTimeOut) {
  const testing::TemporaryFolder folder;
  const testing::Ended ended =
      testing::RunProcesses(1, std::string("DISABLED_DeviceHangs.") + GetParam().body,
                            {.environment = {{"TESSERA_RUN_DIR", folder.path()}},
                             .deadline = std::chrono::seconds(15)})[0];
  EXPECT_EQ(ended.exit_code, GetParam().exit_code) << ended.output;
  for (const char* word : GetParam().words) {
    EXPECT_CONTAINS(ended.output, word);
  }
}

INSTANTIATE_TEST_SUITE_P(
    DeviceHangs, DeviceHangs,
    ::testing::Values(
        Case{
            "TheDeviceIsStuck",
            1,
            {"tessera watchdog: all_reduce for unit 'head' (call 1 of group 'dp'), rank 0: rank(s) "
             "1 did not arrive for ",
             "error: all_reduce for unit 'head' (call 1 of group 'dp'), rank 0: rank(s) 1 did not "
             "arrive for 2."}},
        Case{"TheDeviceIsBusy", 0, {}}, Case{"CallWaitsForSeveralDeviceOperations", 0, {}},
        Case{"DestroyedCallCallsTheWatchdog", 0, {}}),
    [](const auto& info) { return info.param.body; });

}  // namespace
}  // namespace tessera::comm
