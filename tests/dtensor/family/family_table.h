#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace tessera::testing {

using Sizes = std::vector<std::int64_t>;
using Tensors = std::vector<at::Tensor>;

/// A tensor that an operation takes. Only reals have gradients.
struct Operand {
  enum Kind { kReals, kPositive, kMask, kIndices };
  Sizes sizes;
  Kind kind = kReals;
  std::int64_t limit = 0;  ///< indices are below it
};

/// Layouts of the operands, and the layouts and the communication expected of them. Placements are
/// "S0" (sharded on dimension 0), "R" (replicated), "P" (a pending sum; "Pmax" and so on), with a
/// comma between mesh dimensions and a blank between tensors. Communication is "-" for none, or
/// what one rank sends with each collective: "all_reduce 64" bytes, "2 all_reduce 128" in two
/// calls.
struct LayoutCase {
  const char* operands;
  const char* results;
  const char* forward;
  const char* gradients = "";  ///< of the reals among the operands; "-": it has none
  const char* backward = "";
};

struct Operation {
  const char* name;
  std::vector<Operand> operands;
  std::function<Tensors(const Tensors&)> run;
  std::vector<LayoutCase> layouts;  ///< on 4 ranks, or on 2 x 2 where there are commas
  bool differentiable = true;
  bool random = false;  ///< the oracle is the same operation on replicated operands
};

struct Family {
  const char* name;
  std::vector<Operation> operations;
};

/// The table: every family of operators, with its rows. The test runs them, docs/sharding_rules.md
/// lists them.
std::vector<Family> families();

// Its parts.
std::vector<Family> elementwise_families();
std::vector<Family> matmul_families();
std::vector<Family> reduction_families();
std::vector<Family> normalisation_families();
std::vector<Family> fused_families();
std::vector<Family> view_families();
std::vector<Family> indexing_families();
std::vector<Family> network_families();
std::vector<Family> optimizer_families();

/// docs/sharding_rules.md.
std::string render(const std::vector<Family>& families);

}  // namespace tessera::testing
