#pragma once

namespace tessera {

/// While it lives, on this thread: an operator without a sharding rule, and a redistribution that
/// nobody wrote, throw Error instead of gathering with a warning. TESSERA_STRICT=1 does the same for
/// the whole process. Backward runs under the scope that is active when backward() is called.
class StrictScope {
 public:
  explicit StrictScope(bool strict = true);
  ~StrictScope();
  StrictScope(const StrictScope&) = delete;
  StrictScope& operator=(const StrictScope&) = delete;

 private:
  bool outer_;
};

bool is_strict();

}  // namespace tessera
