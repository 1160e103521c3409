// The calls of the ranks since they last compared: a hash of all calls, and the texts of the first
// ones. The hash decides, the texts are for the message.

#include "checked/call_history.h"

#include <algorithm>
#include <bit>
#include <map>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

/// Bounds the memory where nothing ever compares; an iteration of FSDP has far fewer calls.
constexpr std::size_t kKeptCalls = 4096;

using Calls = std::vector<std::string>;

/// The calls that each rank kept, sent as one text in which a zero ends each call.
std::vector<Calls> gather_calls(Communicator& group, const Calls& own) {
  std::string text;
  for (const std::string& call : own) {
    text.append(call.c_str(), call.size() + 1);
  }
  std::vector<Calls> result;
  for (const std::string& theirs : gather_texts(group, c10::kCPU, text)) {
    Calls& calls = result.emplace_back();
    for (std::size_t begin = 0; begin < theirs.size(); begin += calls.back().size() + 1) {
      calls.emplace_back(theirs.c_str() + begin);
    }
  }
  return result;
}

/// A rank with fewer calls has done nothing at this position.
const std::string& call_at(const Calls& calls, std::size_t position) {
  static const std::string nothing = "nothing";
  return position < calls.size() ? calls[position] : nothing;
}

/// Where the calls of two ranks first differ; the number kept by both if they do not.
std::size_t first_difference_of(const std::vector<Calls>& calls) {
  std::size_t first = kKeptCalls;
  for (const Calls& others : calls) {
    const auto [a, b] = std::ranges::mismatch(calls.front(), others);
    if (a != calls.front().end() || b != others.end()) {
      first = std::min(first, static_cast<std::size_t>(b - others.begin()));
    }
  }
  return first;
}

std::string ranks_text(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? " on rank " : " on ranks ") + join(ranks);
}

}  // namespace

void CallHistory::add(std::string call) {
  ++count_;
  // The zero at its end keeps "ab", "c" apart from "a", "bc".
  hash_ = hash_of({call.c_str(), call.size() + 1}, hash_);
  if (calls_.size() < kKeptCalls) {
    calls_.push_back(call);
  }
  last_ = std::move(call);
}

std::string first_difference(const CallHistory& history, Communicator& group,
                             const std::vector<int>& ranks) {
  // Hashes first: usually the calls are equal, and their texts need not be sent.
  const auto all = gather_values(
      group, c10::kCPU,
      {std::bit_cast<std::int64_t>(history.hash()), static_cast<std::int64_t>(history.count())});
  if (std::ranges::all_of(all, [&](const auto& numbers) { return numbers == all.front(); })) {
    return "";
  }
  const std::vector<Calls> calls = gather_calls(group, history.calls());
  const std::size_t position = first_difference_of(calls);
  // The hashes differ but the texts do not: the difference is after the kept texts.
  if (position == kKeptCalls) {
    return detail::concat("those after the first ", kKeptCalls);
  }
  const std::string& here = call_at(calls[static_cast<std::size_t>(group.rank())], position);
  // By call, so that the message names a call once, with all ranks that made it.
  std::map<std::string, std::vector<int>> elsewhere;
  for (std::size_t rank = 0; rank < calls.size(); ++rank) {
    const std::string& there = call_at(calls[rank], position);
    if (there != here) {
      elsewhere[there].push_back(ranks[rank]);
    }
  }
  std::string text = detail::concat("call ", position + 1, " is ", here, " on this rank");
  for (const auto& [call, of] : elsewhere) {
    text += ", " + call + ranks_text(of);
  }
  return text;
}

}  // namespace tessera::comm
