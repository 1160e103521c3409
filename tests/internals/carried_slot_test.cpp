// Canary: what the debug info of libtorch must do for the values that a backward takes along.

#include "tessera/internals/detail/carried_slot.h"

#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>

#include <memory>
#include <thread>

namespace tessera::detail {
namespace {

struct Number final : c10::DebugInfoBase {
  explicit Number(int n) : number(n) {}
  int number;
};

int number_in(Carried what) {
  const c10::DebugInfoBase* found = c10::ThreadLocalDebugInfo::get(kind_of(what));
  return found == nullptr ? 0 : static_cast<const Number*>(found)->number;
}

TEST(CarriedSlotCanary, IsSeparateForEachValue) {
  const c10::DebugInfoGuard strict(kind_of(Carried::kStrict), std::make_shared<Number>(1));
  const c10::DebugInfoGuard watch(kind_of(Carried::kModuleWatch), std::make_shared<Number>(2));
  const c10::DebugInfoGuard libtorch(c10::DebugInfoKind::TEST_INFO, std::make_shared<Number>(3));
  EXPECT_EQ(number_in(Carried::kStrict), 1);
  EXPECT_EQ(number_in(Carried::kModuleWatch), 2);
  EXPECT_EQ(number_in(Carried::kMemoryScope), 0);
}

TEST(CarriedSlotCanary, GoesToAnotherThreadWithLibtorchsState) {
  const c10::DebugInfoGuard strict(kind_of(Carried::kStrict), std::make_shared<Number>(1));
  const at::ThreadLocalState state;
  int without = -1;
  int with = -1;
  std::thread([&] {
    without = number_in(Carried::kStrict);
    const at::ThreadLocalStateGuard guard(state);
    with = number_in(Carried::kStrict);
  }).join();
  EXPECT_EQ(without, 0);
  EXPECT_EQ(with, 1);
}

}  // namespace
}  // namespace tessera::detail
