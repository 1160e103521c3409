// Canaries: dispatch keys that libtorch leaves to others, and which of them a thread has.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include "tessera/internals/detail/key_scopes.h"
#include "tessera/internals/detail/lent_keys.h"

namespace tessera::detail {
namespace {

int arrived = 0;

/// Counts a call, and sends it on.
template <c10::DispatchKey key>
void note(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  ++arrived;
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key), stack);
}

/// Throws if libtorch has a fallback for the key itself.
template <c10::DispatchKey key>
torch::Library notes_calls() {
  torch::Library library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&note<key>>());
  return library;
}

template <c10::DispatchKey key>
int calls_that_arrive() {
  const torch::Library library = notes_calls<key>();
  const at::Tensor x = at::ones({2});
  arrived = 0;
  EXPECT_TRUE(at::equal(at::neg(x), at::full({2}, -1.0)));
  EXPECT_EQ(arrived, 0);
  const IncludeKeys include(key);
  at::neg(x);
  return arrived;
}

TEST(LentKeysCanary, AreReachedOnceAThreadIncludesThem) {
  EXPECT_EQ(calls_that_arrive<kDistributedKey>(), 1);
  EXPECT_EQ(calls_that_arrive<kRandomKey>(), 1);
  EXPECT_EQ(calls_that_arrive<kFakeModeKey>(), 1);
}

TEST(LentKeysCanary, PlaceholdersHaveNoFallbackOfLibtorch) {
  EXPECT_NO_THROW(notes_calls<kPlaceholderKey>());
}

bool is_first(c10::DispatchKey first, c10::DispatchKey second) {
  const auto both = c10::DispatchKeySet(first) | c10::DispatchKeySet(second);
  return both.highestPriorityTypeId() == first;
}

TEST(LentKeysCanary, HaveThePriorityAtWhichCallsAreSeen) {
  EXPECT_TRUE(is_first(kRandomKey, c10::DispatchKey::AutogradCPU));
  EXPECT_TRUE(is_first(c10::DispatchKey::AutogradCPU, kDistributedKey));
  EXPECT_TRUE(is_first(c10::DispatchKey::ADInplaceOrView, kDistributedKey));
  EXPECT_TRUE(is_first(kDistributedKey, kFakeModeKey));
  EXPECT_TRUE(is_first(kFakeModeKey, c10::DispatchKey::CPU));
}

TEST(KeyScopesCanary, IncludeAndExclude) {
  EXPECT_FALSE(is_included(kDistributedKey));
  EXPECT_FALSE(is_below_autograd());
  const at::Tensor x = at::ones({2}).requires_grad_();
  {
    const IncludeKeys include(kDistributedKey);
    const ExcludeKeys exclude(c10::autograd_dispatch_keyset);
    EXPECT_TRUE(is_included(kDistributedKey));
    EXPECT_TRUE(is_below_autograd());
    const ExcludeKeys not_here(kDistributedKey);
    EXPECT_FALSE((x * 2).requires_grad());
  }
  EXPECT_FALSE(is_included(kDistributedKey));
  EXPECT_FALSE(is_below_autograd());
}

TEST(KeyScopesCanary, RestoreEarlierKeys) {
  const KeysOfThread before = keys_of_thread();
  const IncludeKeys include(kDistributedKey);
  const KeysOfThread within = keys_of_thread();
  {
    const RestoreKeys restored(before);
    EXPECT_FALSE(is_included(kDistributedKey));
    const RestoreKeys again(within);
    EXPECT_TRUE(is_included(kDistributedKey));
  }
  EXPECT_TRUE(is_included(kDistributedKey));
}

}  // namespace
}  // namespace tessera::detail
