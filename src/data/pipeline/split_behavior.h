#pragma once

#include <c10/util/FunctionRef.h>

#include <cstddef>

#include "pipeline/json_field.h"

namespace tessera::data {

/// What happens to the matches at which a text is split.
enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

SplitBehavior read_split_behavior(const JsonField& field);

/// Joins matches and what is between them to pieces.
class BehaviorSplitter {
 public:
  using Give = c10::function_ref<void(std::size_t begin, std::size_t end)>;

  BehaviorSplitter(SplitBehavior behavior, Give give) : behavior_(behavior), give_(give) {}

  /// From left to right, without holes.
  void add(std::size_t begin, std::size_t end, bool match);
  void finish();

 private:
  /// Whether the next part belongs to the piece that ends with the last one.
  bool joins(bool next_is_match) const;

  SplitBehavior behavior_;
  Give give_;
  std::size_t begin_ = 0;  ///< of the piece that may still grow
  std::size_t end_ = 0;
  bool match_ = false;  ///< its last part is one
};

}  // namespace tessera::data
