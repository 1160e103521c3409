#include "call_history.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <map>
#include <utility>

#include "group_info.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kKeptCalls = 4096;

/// FNV-1a.
std::uint64_t hash_on(std::uint64_t hash, const std::string& text) {
  for (std::size_t i = 0; i <= text.size(); ++i) {  // with the zero at its end
    hash = (hash ^ static_cast<unsigned char>(text.c_str()[i])) * 0x100000001b3;
  }
  return hash;
}

template <class T>
at::Tensor bytes_over(std::vector<T>& values) {
  return at::from_blob(values.data(), {static_cast<std::int64_t>(values.size() * sizeof(T))},
                       at::kByte);
}

/// All ranks' values, one after another; as many on each.
template <class T>
std::vector<T> gather_values(Communicator& group, std::vector<T> own) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<T> all(own.size() * static_cast<std::size_t>(group.size()));
  group.all_gather(bytes_over(all), bytes_over(own))->wait();
  return all;
}

using Calls = std::vector<std::string>;

/// The calls that all ranks kept.
std::vector<Calls> gather_calls(Communicator& group, const Calls& own) {
  std::vector<char> text;
  for (const std::string& call : own) {
    text.insert(text.end(), call.c_str(), call.c_str() + call.size() + 1);
  }
  const std::vector<std::uint64_t> sizes =
      gather_values(group, std::vector<std::uint64_t>{text.size()});
  const std::size_t longest = *std::ranges::max_element(sizes);
  text.resize(longest);
  const std::vector<char> all = gather_values(group, std::move(text));
  std::vector<Calls> result(sizes.size());
  for (std::size_t rank = 0; rank < sizes.size(); ++rank) {
    const char* const begin = all.data() + rank * longest;
    for (const char* call = begin; call < begin + sizes[rank];
         call += result[rank].back().size() + 1) {
      result[rank].emplace_back(call);
    }
  }
  return result;
}

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
  hash_ = hash_on(hash_, call);
  if (calls_.size() < kKeptCalls) {
    calls_.push_back(call);
  }
  last_ = std::move(call);
}

std::string first_difference(const CallHistory& history, Communicator& group,
                             const std::vector<int>& ranks) {
  const std::vector<std::uint64_t> own = {history.hash(), history.count()};
  const std::vector<std::uint64_t> all = gather_values(group, own);
  bool equal = true;
  for (std::size_t i = 0; i < all.size(); ++i) {
    equal &= all[i] == all[i % 2];
  }
  if (equal) {
    return "";
  }
  const std::vector<Calls> calls = gather_calls(group, history.calls());
  const std::size_t position = first_difference_of(calls);
  if (position == kKeptCalls) {
    return detail::concat("those after the first ", kKeptCalls);
  }
  const std::string& here = call_at(calls[static_cast<std::size_t>(group.rank())], position);
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
