#include "nccl/launch.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <set>

#include "nccl/buffers.h"
#include "nccl/reduction.h"
#include "record/record.h"
#include "record/settings.h"
#include "runtime/capture.h"

namespace fake_cuda {
namespace {

using Clock = std::chrono::steady_clock;

thread_local int group_depth = 0;
thread_local std::vector<Operation> group;

/// The communicators of a group, each with the place of the group among its operations.
using Turns = std::map<CommunicatorPtr, std::uint64_t>;

/// The caller holds issue_mutex().
Turns take_turns(const std::vector<Operation>& operations) {
  Turns turns;
  for (const Operation& operation : operations) {
    if (!turns.contains(operation.communicator)) {
      turns[operation.communicator] = operation.communicator->take_turn();
    }
  }
  return turns;
}

/// False if one of the communicators is aborted, or it gets too late.
bool wait_for(const Turns& turns, std::optional<Clock::time_point> deadline) {
  Backoff backoff;
  for (const auto& [communicator, turn] : turns) {
    while (!communicator->has_turn(turn) || communicator->lost()) {
      if (communicator->aborted() || (deadline && Clock::now() > *deadline)) {
        return false;
      }
      backoff.pause();
    }
  }
  return true;
}

bool run(const std::vector<Operation>& operations, const Turns& turns,
         std::optional<Clock::time_point> deadline = std::nullopt) {
  const bool done = wait_for(turns, deadline) && execute(operations, deadline);
  for (const auto& [communicator, turn] : turns) {
    communicator->end_turn();
  }
  return done;
}

void count(const std::vector<Operation>& operations) {
  const std::lock_guard lock(record().mutex);
  record().groups += operations.size() > 1 ? 1 : 0;
  for (const Operation& operation : operations) {
    CollectiveUse& use = record().collectives[{
        operation.communicator->id(), name_of(operation.collective), name_of(operation.type),
        operation.stream->id(), operation.stream->priority()}];
    ++use.calls;
    use.bytes += static_cast<std::int64_t>(operation.input_bytes());
    use.unaligned += is_aligned(operation) ? 0 : 1;
    use.unaligned_part = std::max(use.unaligned_part,
                                  static_cast<std::int64_t>(bytes_of_unaligned_parts(operation)));
    ++record().streams[operation.stream->id()].collectives;
  }
}

/// On the stream of the first operation. The others wait before and after, as NCCL lets them.
void launch(const std::vector<Operation>& operations) {
  count(operations);
  Stream& first = *operations.front().stream;
  std::set<Stream*> others;
  for (const Operation& operation : operations) {
    others.insert(operation.stream);
  }
  others.erase(&first);
  for (Stream* const other : others) {
    first.wait_for(other->mark());
  }
  {
    // Turns are taken in the order in which the streams get the work.
    const std::lock_guard lock(issue_mutex());
    first.submit_waiting([operations, turns = take_turns(operations)] { run(operations, turns); });
  }
  for (Stream* const other : others) {
    other->wait_for(first.mark());
  }
}

void launch_or_capture(std::vector<Operation> operations) {
  if (operations.empty()) {
    return;
  }
  Stream& first = *operations.front().stream;
  if (first.capture == nullptr) {
    return launch(operations);
  }
  first.capture->add(first, [operations = std::move(operations)](Stream& on) mutable {
    for (Operation& operation : operations) {
      operation.stream = &on;
    }
    launch(operations);
  });
}

/// The faults that are asked for. An operation that is lost takes its communicator with it.
ncclResult_t fail_on_demand(Communicator& communicator) {
  static std::atomic<std::int64_t> calls = 0;
  const std::int64_t number = ++calls;
  const Faults& faults = settings().faults;
  if (faults.nccl == number) {
    return ncclSystemError;
  }
  const bool broken = faults.async && number >= *faults.async;
  if (broken) {
    communicator.fail(ncclRemoteError);
  }
  if (broken || (faults.lost && number >= *faults.lost)) {
    communicator.lose();
  }
  return ncclSuccess;
}

}  // namespace

ncclResult_t call(Operation operation) {
  if (operation.communicator == nullptr || operation.stream == nullptr) {
    return ncclInvalidArgument;
  }
  if (!check_buffers(operation)) {
    return ncclInvalidArgument;
  }
  const ncclResult_t result = fail_on_demand(*operation.communicator);
  if (result != ncclSuccess) {
    return result;
  }
  if (group_depth > 0) {
    group.push_back(std::move(operation));
  } else {
    launch_or_capture({std::move(operation)});
  }
  return ncclSuccess;
}

bool run_on_host(const Operation& operation) {
  constexpr std::chrono::seconds kPatience{10};
  Turns turns;
  {
    const std::lock_guard lock(issue_mutex());
    turns = take_turns({operation});
  }
  return run({operation}, turns, Clock::now() + kPatience);
}

}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (--group_depth == 0) {
    launch_or_capture(std::exchange(group, {}));
  }
  return ncclSuccess;
}

}  // extern "C"
