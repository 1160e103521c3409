#include "shm/shm_group.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

/// As Communicator calls the collective, for messages.
const char* name_of(ShmKind kind) {
  switch (kind) {
    case ShmKind::kAllGather:
      return "all_gather";
    case ShmKind::kAllReduce:
      return "all_reduce";
    case ShmKind::kReduceScatter:
      return "reduce_scatter";
    case ShmKind::kAllToAll:
      return "all_to_all";
    case ShmKind::kBroadcast:
      return "broadcast";
    case ShmKind::kBarrier:
      return "barrier";
  }
  return "unknown";
}

/// Not the rounds: ranks of an all-to-all need different numbers of them.
bool same(const ShmCall& a, const ShmCall& b) {
  return a.sequence == b.sequence && a.elements == b.elements && a.kind == b.kind &&
         a.dtype == b.dtype && a.op == b.op && a.root == b.root && a.purpose == b.purpose;
}

std::string text_of(const ShmOperation& operation) {
  return with_purpose(name_of(operation.kind), operation.purpose);
}

/// "12 elements of Float, sum": what the ranks of a call of this kind compare.
std::string arguments_of(const ShmCall& call) {
  std::string type = c10::toString(static_cast<c10::ScalarType>(call.dtype));
  std::string elements = detail::concat(call.elements, " elements of ", type);
  switch (static_cast<ShmKind>(call.kind)) {
    case ShmKind::kAllReduce:
    case ShmKind::kReduceScatter:
      return detail::concat(elements, ", ", to_string(static_cast<ReduceOp>(call.op)));
    case ShmKind::kBroadcast:
      return detail::concat(elements, ", root ", call.root);
    case ShmKind::kAllToAll:
      return type;  // ranks send differently much
    case ShmKind::kBarrier:
      return "";
    case ShmKind::kAllGather:
      break;
  }
  return elements;
}

/// "all_reduce (call 7: 12 elements of Float, sum)".
std::string to_text(const ShmCall& call) {
  const std::string purpose(call.purpose.data(), strnlen(call.purpose.data(), call.purpose.size()));
  const std::string arguments = arguments_of(call);
  return detail::concat(with_purpose(name_of(static_cast<ShmKind>(call.kind)), purpose), " (call ",
                        call.sequence, arguments.empty() ? "" : ": ", arguments, ")");
}

}  // namespace

ShmGroup::ShmGroup(ShmSegment segment, GroupInfo group)
    : segment_(std::move(segment)),
      group_(std::move(group)),
      slots_(static_cast<std::size_t>(group_.size())) {}

void ShmGroup::start(const ShmOperationPtr& operation) {
  // Its slots are needed. Its error, if it has one, is thrown here and again by its own wait().
  if (under_way_ != nullptr) {
    finish(*under_way_);
  }
  if (failed_) {
    throw PeerError(describe(group_, text_of(*operation).c_str()) +
                    ": the group failed earlier; end this rank and start the job again");
  }
  // The call before the round's arrival: who sees that this rank has arrived can read its call.
  publish(*operation);
  produce(*operation, 0);
  under_way_ = operation;
}

void ShmGroup::publish(const ShmOperation& operation) {
  // The call of the round that produce() is about to begin. It stays until the round after the
  // next, which no rank begins before all have read this one.
  ShmCall& call = segment_.call(group_.rank, round_ + 1);
  call = {++sequence_,
          operation.elements,
          static_cast<std::int32_t>(operation.kind),
          operation.dtype,
          static_cast<std::int32_t>(operation.op),
          operation.root,
          operation.rounds,
          {}};
  // The end of a name tells more than its beginning.
  const std::size_t length = std::min(operation.purpose.size(), call.purpose.size());
  std::copy_n(operation.purpose.end() - static_cast<std::ptrdiff_t>(length), length,
              call.purpose.begin());
}

void ShmGroup::produce(const ShmOperation& operation, std::int64_t round) {
  ++round_;
  operation.produce(round, segment_.slot(group_.rank, round_));
  segment_.arrive(group_.rank, round_);
}

void ShmGroup::finish(ShmOperation& operation) {
  ShmOperationPtr keep;  // until the end: the caller may have dropped the operation
  if (!operation.done) {
    operation.done = true;
    keep = std::exchange(under_way_, nullptr);
    try {
      run(operation);
      // After a PeerError the rounds do not match any more. After another Error all ranks have
      // thrown it in the same round, and the next call can begin.
    } catch (const PeerError&) {
      failed_ = true;
      operation.error = std::current_exception();
    } catch (const Error&) {
      operation.error = std::current_exception();
    }
  }
  if (operation.error) {
    std::rethrow_exception(operation.error);
  }
}

void ShmGroup::run(ShmOperation& operation) {
  const std::string collective = text_of(operation);
  std::int64_t rounds = 1;
  for (std::int64_t round = 0; round < rounds; ++round) {
    if (round > 0) {
      produce(operation, round);
    }
    // Behind it every slot of the round can be read, until this rank arrives at the next.
    segment_.wait(group_, round_, collective.c_str());
    if (round == 0) {
      // Only now: a rank with little to send does not know how many rounds its peers need.
      rounds = agreed_rounds(operation);
    }
    for (int rank = 0; rank < group_.size(); ++rank) {
      slots_[static_cast<std::size_t>(rank)] = segment_.slot(rank, round_);
    }
    operation.consume(round, slots_);
  }
}

std::int64_t ShmGroup::agreed_rounds(const ShmOperation& operation) {
  const ShmCall& own = segment_.call(group_.rank, round_);
  std::int64_t rounds = operation.rounds;
  for (int rank = 0; rank < group_.size(); ++rank) {
    const ShmCall& peer = segment_.call(rank, round_);
    // Every rank compares with every other, so that all of them throw, and none continues alone.
    TESSERA_CHECK(same(own, peer), describe(group_, text_of(operation).c_str()),
                  ": the ranks disagree: this one calls ", to_text(own), ", rank ",
                  group_.ranks[static_cast<std::size_t>(rank)], " calls ", to_text(peer),
                  "; make the ranks issue the same collectives in the same order");
    rounds = std::max(rounds, peer.rounds);
  }
  return rounds;
}

void ShmGroup::abort() {
  segment_.wake_peers();
}

}  // namespace tessera::comm
