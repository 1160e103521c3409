#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <vector>

#include "tessera/data/batch_loader.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::data {

/// Loads a rank's rows of the next step on a separate thread while this one is computed. The rows
/// of a step are those that the loader gives for it, in whatever order steps are asked for: there
/// is no position. One thread at a time. The destructor waits for what is being read.
class PrefetchLoader {
 public:
  /// Rows [first, last) of the batches of `loader`; `pinned` as BatchLoader::load() takes it.
  /// Without `beside` load() reads the next step itself, before it returns: for code that tracks
  /// allocations, which then come in an order that does not depend on threads.
  PrefetchLoader(std::shared_ptr<const BatchLoader> loader, std::int64_t first, std::int64_t last,
                 bool pinned = false, bool beside = true);
  /// The same of several ranges, one behind the other.
  PrefetchLoader(std::shared_ptr<const BatchLoader> loader, std::vector<RowRange> ranges,
                 bool pinned = false, bool beside = true);
  /// Those of `step`, and begins to load those of the step behind it. Throws what load() throws, at
  /// the step that it is of.
  BatchLoader::Batch load(std::int64_t step);

 private:
  void begin(std::int64_t step);

  std::shared_ptr<const BatchLoader> loader_;
  std::vector<RowRange> ranges_;
  bool pinned_, beside_;
  std::int64_t step_ = -1;                 ///< the one that is being loaded
  std::future<BatchLoader::Batch> batch_;  ///< from std::async: its destructor waits
};

}  // namespace tessera::data
TESSERA_API_END
