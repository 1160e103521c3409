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

/// An operand of an operation. Only operands of kind kReals and kPositive have gradients.
struct Operand {
  enum Kind { kReals, kPositive, kMask, kIndices };
  Sizes sizes;
  Kind kind = kReals;
  std::int64_t limit = 0;  ///< kIndices: all values are below `limit`
};

/// One row: the layouts of the operands, and the expected layouts and communication. Placements are
/// "S0" (sharded on dimension 0), "R" (replicated), "P" (Partial sum; "Pmax" and so on), with a
/// comma between mesh dimensions and a blank between tensors. "2 all_reduce 128" means that two
/// all-reduces of one rank send 128 bytes together, "all_reduce 64" that one all-reduce sends 64
/// bytes, and "-" that nothing is sent.
struct LayoutCase {
  std::string operands, results, forward;
  std::string gradients;  ///< of the reals among the operands; "-" for a real without one
  std::string backward;
};

struct Operation {
  const char* name;
  std::vector<Operand> operands;
  std::function<Tensors(const Tensors&)> run;
  std::vector<LayoutCase> layouts;  ///< mesh: 2 x 2 if placements have commas, else 4
  bool differentiable;
  bool random = false;  ///< if true: replicated operands give the expected results
};

struct Family {
  const char* name;
  std::vector<Operation> operations;

  /// `run` takes the operands and returns one tensor or several. Columns of a row: "operands |
  /// results | forward | gradients | backward". Without gradients, a row ends after the column
  /// "forward".
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

/// Returns the family table, with all families of operators. The test checks its rows, and
/// docs/sharding_rules.md lists them.
std::vector<Family> families();

// The following functions return the parts of the family table.
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
