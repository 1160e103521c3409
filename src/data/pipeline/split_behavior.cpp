#include "pipeline/split_behavior.h"

#include <array>
#include <string_view>
#include <utility>

namespace tessera::data {

SplitBehavior read_split_behavior(const JsonField& field) {
  constexpr std::array<std::pair<std::string_view, SplitBehavior>, 5> kNames{
      {{"Removed", SplitBehavior::kRemoved},
       {"Isolated", SplitBehavior::kIsolated},
       {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
       {"MergedWithNext", SplitBehavior::kMergedWithNext},
       {"Contiguous", SplitBehavior::kContiguous}}};
  for (const auto& [name, behavior] : kNames) {
    if (field.text() == name) {
      return behavior;
    }
  }
  field.refuse();
}

void BehaviorSplitter::add(std::size_t begin, std::size_t end, bool match) {
  if (begin_ == end_ || !joins(match)) {
    finish();
    begin_ = begin;
  }
  end_ = end;
  match_ = match;
}

void BehaviorSplitter::finish() {
  if (begin_ < end_ && !(match_ && behavior_ == SplitBehavior::kRemoved)) {
    give_(begin_, end_);
  }
  begin_ = end_;
}

bool BehaviorSplitter::joins(bool next_is_match) const {
  switch (behavior_) {
    case SplitBehavior::kMergedWithPrevious:
      return next_is_match && !match_;
    case SplitBehavior::kMergedWithNext:
      return match_ && !next_is_match;
    case SplitBehavior::kContiguous:
      return match_ == next_is_match;
    default:
      return false;
  }
}

}  // namespace tessera::data
