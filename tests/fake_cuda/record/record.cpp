#include "record/record.h"

#include <algorithm>

namespace fake_cuda {

void MemoryUse::add(std::int64_t bytes) {
  active += bytes;
  peak = std::max(peak, active);
  ++allocations;
}

void MemoryUse::remove(std::int64_t bytes) {
  active -= bytes;
  ++frees;
}

Record& record() {
  static auto* const once = new Record;
  return *once;
}

void count_call(const char* name) {
  const std::lock_guard lock(record().mutex);
  ++record().calls[name];
}

void count_host_sync(const char* call) {
  CallStack stack = take_stack();
  const std::lock_guard lock(record().mutex);
  ++record().host_syncs[{call, std::move(stack)}];
}

void count_violation(const std::string& what) {
  CallStack stack = take_stack();
  const std::lock_guard lock(record().mutex);
  ++record().violations[{what, std::move(stack)}];
}

}  // namespace fake_cuda
