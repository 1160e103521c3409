#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera::testing {

using Sizes = std::vector<std::int64_t>;
using Tensors = std::vector<at::Tensor>;

/// An operand of an operation. Integers and masks (kIndices, kMask) have no gradients.
struct Operand {
  enum Kind { kReals, kPositive, kMask, kIndices };
  Sizes sizes;
  Kind kind = kReals;
  std::int64_t limit = 0;  ///< kIndices: all values are below `limit`
};

/// A table row: operand layouts, and the expected layouts and communication. Placements: "S0"
/// (sharded on dimension 0), "R" (replicated), "P" (Partial sum), "Pmax" (Partial maximum). Commas
/// separate mesh dimensions, blanks separate tensors. Communication: "2 all_reduce 128" is 128
/// bytes per rank in two all-reduces; "-" is none.
struct LayoutCase {
  std::string operands, results, forward;
  std::string gradients;  ///< of the reals among the operands; "-" for a real without one
  std::string backward;
};

struct Operation {
  const char* name;
  std::vector<Operand> operands;
  std::function<Tensors(const Tensors&)> run;
  std::vector<LayoutCase> layouts;  ///< on a 2 x 2 mesh if placements have commas; else 4 ranks
  bool differentiable;
  bool random = false;  ///< whether the operation draws random numbers
};

struct Family {
  const char* name;
  std::vector<Operation> operations;

  /// `run` maps operand tensors to result tensors. A row is "operands | results | forward |
  /// gradients | backward", without the last two columns if the operation has no gradients.
  template <class Run>
  Operation& add(const char* operation, std::vector<Operand> operands, Run run,
                 const std::vector<std::string>& rows) {
    const auto results = [run](const Tensors& t) -> Tensors {
      if constexpr (std::is_same_v<std::invoke_result_t<const Run&, const Tensors&>, at::Tensor>) {
        return {run(t)};
      } else {
        return run(t);
      }
    };
    operations.push_back({operation, std::move(operands), results, layouts_of_rows(rows), true});
    operations.back().differentiable = !operations.back().layouts.front().gradients.empty();
    return operations.back();
  }

 private:
  static std::vector<LayoutCase> layouts_of_rows(const std::vector<std::string>& rows);
};

/// Returns all tables of operators. docs/sharding_rules.md shows them, and the test
/// family_table.cpp checks each of their rows on a mesh.
std::vector<Family> families();

// The following functions return groups of operator families; families() returns all of them.
std::vector<Family> elementwise_families();
std::vector<Family> matmul_families();
std::vector<Family> reduction_families();
std::vector<Family> normalisation_families();
std::vector<Family> fused_families();
std::vector<Family> view_families();
std::vector<Family> indexing_families();
std::vector<Family> network_families();
std::vector<Family> optimizer_families();

/// Returns the text of docs/sharding_rules.md.
std::string render(const std::vector<Family>& families);

}  // namespace tessera::testing
