#pragma once

#include <memory>
#include <vector>

#include "tessera/export.h"

namespace tessera::fsdp {

class TESSERA_API Unit;

/// The order in which the last forward of a root used the units that it gathered. The forward under
/// way prefetches by it. Units that were unsharded before do not count: they may run on some ranks
/// alone, while what is gathered must be the same on all.
class GatherOrder {
 public:
  /// A forward begins.
  void begin();
  /// An all-gather of `unit` has begun.
  void gathered(const std::shared_ptr<Unit>& unit);
  /// `unit` is used. False if this forward has not gathered it.
  bool used(const std::shared_ptr<Unit>& unit);
  /// The unit that the last forward used next. nullptr: none, or this forward has left that order.
  std::shared_ptr<Unit> next() const;
  /// The forward has succeeded: the next one is compared with it, unless it gathered nothing.
  void end();

 private:
  std::vector<std::weak_ptr<Unit>> last_;
  std::vector<std::weak_ptr<Unit>> running_;
  std::vector<std::weak_ptr<Unit>> gathered_;
  bool follows_ = false;  ///< this forward has used the first units of `last_`, in order
};

}  // namespace tessera::fsdp
