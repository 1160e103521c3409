#include <algorithm>

#include "bpe/bpe.h"
#include "tessera/core/error.h"

namespace tessera::data {
namespace {

using Candidate = BpeWorkspace::Candidate;
using Symbol = BpeWorkspace::Symbol;

/// Up to here a scan of all pairs for each merge is quicker than a heap.
constexpr std::size_t kMaxScanned = 48;
constexpr std::uint32_t kNoSymbol = ~std::uint32_t{0};

void merge_by_scan(const MergeTable& merges, BpeWorkspace& workspace) {
  std::vector<TokenId>& ids = workspace.ids;
  std::vector<MergedPair>& pairs = workspace.pairs;
  pairs.clear();
  for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
    pairs.push_back(merges.find(ids[i], ids[i + 1]));
  }
  while (!pairs.empty()) {
    const auto best = std::ranges::min_element(pairs, {}, &MergedPair::rank);
    if (best->rank == MergedPair::kNone) {
      return;
    }
    const auto at = best - pairs.begin();
    const auto i = static_cast<std::size_t>(at);
    ids[i] = best->result;
    ids.erase(ids.begin() + at + 1);
    pairs.erase(best);
    if (i > 0) {
      pairs[i - 1] = merges.find(ids[i - 1], ids[i]);
    }
    if (i + 1 < ids.size()) {
      pairs[i] = merges.find(ids[i], ids[i + 1]);
    }
  }
}

/// Symbols as a linked list, candidates in a heap; those that are out of date are skipped.
class HeapMerge {
 public:
  HeapMerge(const MergeTable& merges, BpeWorkspace& workspace)
      : merges_(merges), symbols_(workspace.symbols), heap_(workspace.candidates) {
    const auto count = static_cast<std::uint32_t>(workspace.ids.size());
    symbols_.clear();
    heap_.clear();
    for (std::uint32_t i = 0; i < count; ++i) {
      symbols_.push_back({workspace.ids[i], i == 0 ? kNoSymbol : i - 1,
                          i + 1 == count ? kNoSymbol : i + 1, false});
    }
    for (std::uint32_t i = 0; i + 1 < count; ++i) {
      if (const auto candidate = candidate_at(i)) {
        heap_.push_back(*candidate);
      }
    }
    std::ranges::make_heap(heap_, later);
  }

  void run() {
    while (!heap_.empty()) {
      std::ranges::pop_heap(heap_, later);
      const Candidate top = heap_.back();
      heap_.pop_back();
      const auto at = static_cast<std::uint32_t>(top.rank_and_position);
      if (!symbols_[at].merged_away && still_holds(at, top)) {
        merge(at, top.result);
      }
    }
  }

  void write(std::vector<TokenId>& ids) const {
    ids.clear();
    for (const Symbol& symbol : symbols_) {
      if (!symbol.merged_away) {
        ids.push_back(symbol.id);
      }
    }
  }

 private:
  static bool later(const Candidate& a, const Candidate& b) {
    return a.rank_and_position > b.rank_and_position;
  }

  std::optional<Candidate> candidate_at(std::uint32_t at) const {
    const Symbol& symbol = symbols_[at];
    if (symbol.next == kNoSymbol) {
      return std::nullopt;
    }
    const MergedPair pair = merges_.find(symbol.id, symbols_[symbol.next].id);
    if (pair.rank == MergedPair::kNone) {
      return std::nullopt;
    }
    return Candidate{std::uint64_t{pair.rank} << 32 | at, pair.result};
  }

  bool still_holds(std::uint32_t at, const Candidate& candidate) const {
    const auto now = candidate_at(at);
    return now && now->rank_and_position == candidate.rank_and_position;
  }

  void merge(std::uint32_t at, TokenId result) {
    Symbol& symbol = symbols_[at];
    Symbol& right = symbols_[symbol.next];
    symbol.id = result;
    symbol.next = right.next;
    right.merged_away = true;
    if (symbol.next != kNoSymbol) {
      symbols_[symbol.next].previous = at;
      push(at);
    }
    if (symbol.previous != kNoSymbol) {
      push(symbol.previous);
    }
  }

  void push(std::uint32_t at) {
    if (const auto candidate = candidate_at(at)) {
      heap_.push_back(*candidate);
      std::ranges::push_heap(heap_, later);
    }
  }

  const MergeTable& merges_;
  std::vector<Symbol>& symbols_;
  std::vector<Candidate>& heap_;
};

}  // namespace

void merge_symbols(const MergeTable& merges, BpeWorkspace& workspace) {
  const std::size_t count = workspace.ids.size();
  TESSERA_CHECK(count < kNoSymbol, "a word of ", count,
                " characters is too long for a tokenizer: encode the text in parts");
  if (count <= kMaxScanned) {
    merge_by_scan(merges, workspace);
    return;
  }
  HeapMerge heap(merges, workspace);
  heap.run();
  heap.write(workspace.ids);
}

}  // namespace tessera::data
