#include "nccl/communicator.h"

#include <map>
#include <mutex>

#include "record/record.h"
#include "runtime/device.h"

namespace fake_cuda {
namespace {

struct Communicators {
  std::mutex mutex;
  std::map<ncclComm_t, CommunicatorPtr> by_handle;
  std::int64_t ended = 0;
};

Communicators& communicators() {
  static auto* const once = new Communicators;
  return *once;
}

}  // namespace

Communicator::Communicator(std::string id, int rank, int ranks, std::shared_ptr<Mailbox> mailbox,
                           std::string made_by)
    : id_(std::move(id)),
      rank_(rank),
      ranks_(ranks),
      device_(current_device()),
      mailbox_(std::move(mailbox)) {
  const std::lock_guard lock(record().mutex);
  row_ = record().communicators.size();
  record().communicators.push_back(
      {.id = id_, .ranks = ranks, .rank = rank, .made_by = std::move(made_by), .ended_by = ""});
}

void Communicator::note_finalized() {
  finalized_ = true;
  const std::lock_guard lock(record().mutex);
  record().communicators[row_].finalized = true;
}

void Communicator::note_end(const std::string& how) {
  std::int64_t place = 0;
  {
    const std::lock_guard lock(communicators().mutex);
    place = communicators().ended++;
  }
  const std::lock_guard lock(record().mutex);
  record().communicators[row_].ended_by = how;
  record().communicators[row_].ended = place;
}

std::mutex& issue_mutex() {
  static auto* const once = new std::mutex;
  return *once;
}

CommunicatorPtr find(ncclComm_t handle) {
  const std::lock_guard lock(communicators().mutex);
  const auto found = communicators().by_handle.find(handle);
  if (found == communicators().by_handle.end()) {
    count_violation("a communicator that does not exist");
    return nullptr;
  }
  return found->second;
}

ncclComm_t remember(CommunicatorPtr communicator) {
  const auto handle = reinterpret_cast<ncclComm_t>(communicator.get());
  const std::lock_guard lock(communicators().mutex);
  communicators().by_handle[handle] = std::move(communicator);
  return handle;
}

void forget(ncclComm_t handle) {
  const std::lock_guard lock(communicators().mutex);
  communicators().by_handle.erase(handle);
}

}  // namespace fake_cuda
