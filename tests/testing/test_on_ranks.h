#pragma once

#include <gtest/gtest.h>

#include "testing/ranks.h"

// A test whose body runs on every rank: TEST_ON_RANKS(Suite, Name, 2) { ... rank ... } on this many
// ranks, TEST_ON_MESH(Suite, Name, {2, 2}, {"dp", "tp"}) { ... rank, mesh ... } on a mesh.

#define TEST_ON_RANKS(suite, name, ...)                                    \
  static void suite##_##name##_on_ranks(::tessera::testing::Rank& rank);   \
  TEST(suite, name) {                                                      \
    ::tessera::testing::RunRanks(__VA_ARGS__, &suite##_##name##_on_ranks); \
  }                                                                        \
  static void suite##_##name##_on_ranks([[maybe_unused]] ::tessera::testing::Rank& rank)

#define TEST_ON_MESH(suite, name, ...)                                                  \
  static void suite##_##name##_on_mesh(::tessera::testing::Rank& rank,                  \
                                       const ::tessera::DeviceMesh& mesh);              \
  TEST(suite, name) {                                                                   \
    ::tessera::testing::RunOnMesh(__VA_ARGS__, &suite##_##name##_on_mesh);              \
  }                                                                                     \
  static void suite##_##name##_on_mesh([[maybe_unused]] ::tessera::testing::Rank& rank, \
                                       [[maybe_unused]] const ::tessera::DeviceMesh& mesh)
