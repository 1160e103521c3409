#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "nccl/nccl.h"
#include "record/record.h"
#include "runtime/runtime.h"

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

namespace {

constexpr std::chrono::seconds kPatience{30};

/// With TESSERA_FAKE_CUDA_FAULT=init:K, the call that makes the K-th communicator never returns.
void hang_on_demand() {
  static std::atomic<std::int64_t> begun = 0;
  const std::int64_t number = ++begun;
  while (settings().fault("init") == number) {
    std::this_thread::sleep_for(kPatience);
  }
}

/// With TESSERA_FAKE_CUDA_FAULT=slow-end:K, ending the K-th communicator takes 1 s longer.
void end_slowly_on_demand() {
  static std::atomic<std::int64_t> ended = 0;
  if (settings().fault("slow-end") == ++ended) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
  }
}

ncclResult_t make(ncclComm_t* out, const std::string& id, int rank, int ranks,
                  const char* made_by) {
  *out = nullptr;
  hang_on_demand();
  std::shared_ptr<Mailbox> mailbox = Mailbox::open(id, rank, ranks, kPatience);
  if (mailbox == nullptr) {
    count_violation("communicator " + id + ": not all of its " + std::to_string(ranks) +
                    " ranks came within 30 s");
    return ncclSystemError;
  }
  *out = remember(std::make_shared<Communicator>(id, rank, ranks, std::move(mailbox), made_by));
  return ncclSuccess;
}

/// All-gathers `own`. Returns the values of all ranks in rank order; empty if a rank did not call.
template <class T>
std::vector<T> gather(const CommunicatorPtr& communicator, const T& own) {
  std::vector<T> all(static_cast<std::size_t>(communicator->ranks()));
  const Operation operation{.collective = Collective::kAllGather,
                            .send = &own,
                            .receive = all.data(),
                            .count = sizeof(T),
                            .type = ncclInt8,
                            .op = ncclSum,
                            .root = 0,
                            .communicator = communicator,
                            .stream = nullptr};
  return run_on_host(operation) ? all : std::vector<T>{};
}

/// Waits until all ranks have begun to end the communicator, as NCCL may do.
void meet_at_end(const CommunicatorPtr& communicator) {
  if (gather(communicator, std::int8_t{0}).empty()) {
    count_violation("communicator " + communicator->id() +
                    ": not all of its ranks ended it within 10 s");
  }
}

/// The host and the device of a rank. As in NCCL, ranks are on one host if their NCCL_HOSTIDs are
/// equal or not set.
struct Place {
  std::array<char, 64> host{};
  int device = 0;

  bool operator==(const Place&) const = default;
};

Place own_place(const Communicator& communicator) {
  Place place{.device = communicator.device()};
  if (const char* const host = std::getenv("NCCL_HOSTID")) {
    std::string_view(host).copy(place.host.data(), place.host.size());
  }
  return place;
}

/// Like NCCL, returns an error on every rank if two ranks have the same device.
ncclResult_t check_places(const CommunicatorPtr& communicator) {
  const std::vector<Place> places = gather(communicator, own_place(*communicator));
  for (auto place = places.begin(); place != places.end(); ++place) {
    if (std::find(place + 1, places.end(), *place) != places.end()) {
      return ncclInvalidUsage;
    }
  }
  return places.empty() ? ncclRemoteError : ncclSuccess;
}

ncclResult_t query(ncclComm_t handle, int* out, int (Communicator::*number)() const) {
  const CommunicatorPtr communicator = find(handle);
  *out = communicator == nullptr ? 0 : ((*communicator).*number)();
  return communicator == nullptr ? ncclInvalidArgument : ncclSuccess;
}

struct Wish {
  int color;
  int key;
  int rank;
};

/// Returns the ranks with this color, in the order of ncclCommSplit(): by key, then by rank.
std::vector<Wish> members(std::vector<Wish> wishes, int color) {
  std::erase_if(wishes, [color](const Wish& wish) { return wish.color != color; });
  std::stable_sort(wishes.begin(), wishes.end(),
                   [](const Wish& a, const Wish& b) { return a.key < b.key; });
  return wishes;
}

}  // namespace
}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  count_call("ncclGetUniqueId");
  std::random_device random;
  std::ostringstream text;
  text << std::hex << random() << random();
  std::memset(id->internal, 0, sizeof(id->internal));
  text.str().copy(id->internal, sizeof(id->internal) - 1);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* out, int ranks, ncclUniqueId id, int rank) {
  count_call("ncclCommInitRank");
  const ncclResult_t made = make(out, id.internal, rank, ranks, "init");
  if (made != ncclSuccess) {
    return made;
  }
  const CommunicatorPtr communicator = find(*out);
  const ncclResult_t places = check_places(communicator);
  if (places != ncclSuccess) {
    communicator->note_end("refused");
    forget(std::exchange(*out, nullptr));
  }
  return places;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
  return ncclCommInitRank(out, ranks, id, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* out, int ranks, int rank, int, ncclUniqueId* ids,
                                      ncclConfig_t*) {
  return ncclCommInitRank(out, ranks, ids[0], rank);
}

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* out, ncclConfig_t*) {
  count_call("ncclCommSplit");
  *out = nullptr;
  const CommunicatorPtr parent = find(handle);
  if (parent == nullptr) {
    return ncclInvalidArgument;
  }
  const std::string id = parent->child_id("split");
  const std::vector<Wish> wishes = gather(parent, Wish{color, key, parent->rank()});
  if (wishes.empty()) {
    return ncclRemoteError;
  }
  if (color == NCCL_SPLIT_NOCOLOR) {
    return ncclSuccess;
  }
  const std::vector<Wish> ranks = members(wishes, color);
  const auto self = std::find_if(ranks.begin(), ranks.end(),
                                 [&](const Wish& wish) { return wish.rank == parent->rank(); });
  return make(out, id + "-" + std::to_string(color), static_cast<int>(self - ranks.begin()),
              static_cast<int>(ranks.size()), "split");
}

ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  count_call("ncclCommFinalize");
  const CommunicatorPtr communicator = find(handle);
  if (communicator == nullptr) {
    return ncclInvalidArgument;
  }
  meet_at_end(communicator);
  communicator->note_finalized();
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  count_call("ncclCommDestroy");
  const CommunicatorPtr communicator = find(handle);
  if (communicator == nullptr) {
    return ncclInvalidArgument;
  }
  if (!communicator->finalized()) {
    meet_at_end(communicator);
  }
  end_slowly_on_demand();
  communicator->note_end("destroy");
  forget(handle);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
  count_call("ncclCommAbort");
  const CommunicatorPtr communicator = find(handle);
  if (communicator == nullptr) {
    return ncclInvalidArgument;
  }
  communicator->abort();
  communicator->note_end("abort");
  forget(handle);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  const CommunicatorPtr communicator = find(handle);
  *error = communicator == nullptr ? ncclInvalidArgument : communicator->error();
  return communicator == nullptr ? ncclInvalidArgument : ncclSuccess;
}

ncclResult_t ncclCommCount(ncclComm_t handle, int* count) {
  return query(handle, count, &Communicator::ranks);
}

ncclResult_t ncclCommUserRank(ncclComm_t handle, int* rank) {
  return query(handle, rank, &Communicator::rank);
}

// ncclCommRegister and ncclCommDeregister do nothing: the fake uses all buffers in the same way.
ncclResult_t ncclCommRegister(ncclComm_t, void* buffer, std::size_t, void** handle) {
  count_call("ncclCommRegister");
  *handle = buffer;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(ncclComm_t, void*) {
  count_call("ncclCommDeregister");
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t error) {
  switch (error) {
    case ncclSuccess:
      return "no error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    default:
      return "unhandled error of the fake NCCL";
  }
}

const char* ncclGetLastError(ncclComm_t) {
  return "an error of the fake NCCL";
}

}  // extern "C"
