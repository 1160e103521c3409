#include "family_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <iterator>

namespace tessera::testing {
namespace {

constexpr const char* kIntroduction =
    R"(# What each family of operators communicates

The tests run each row (`tests/dtensor/family/`), forward and backward, on 4 ranks. They compare the values
with libtorch's on one rank and count the collectives at the communicator. After a change, run
`family_test` with `TESSERA_UPDATE_DOCS=1`. [operators.md](operators/operators.md) lists every overload that has a
rule.

Placements: `S0` is `Shard(0)`, `R` is `Replicate()`, `P` is `Partial(sum)`, `Pmax` is `Partial(max)`; a comma
stands between mesh dimensions. A row without a comma is on a mesh of 4, one with it on 2 × 2. Tensors
are of doubles. A collective has the bytes that one rank puts in; `2 all_reduce 128` are two calls, 128
bytes together; `-` is none. The gradients are those of the inputs, if the gradient of the result has the
result's placements (`R` instead of `P`); `-` is none.
)";

const char* name_of(Operand::Kind kind) {
  if (kind == Operand::kMask) {
    return "mask";
  }
  return kind == Operand::kIndices ? "index" : "";
}

std::string sizes_of(const Operation& operation) {
  std::vector<std::string> all;
  for (const auto& operand : operation.operands) {
    all.push_back(fmt::format("{}({})", name_of(operand.kind), fmt::join(operand.sizes, ", ")));
  }
  return fmt::format("{}", fmt::join(all, " "));
}

void add_operation(std::string& text, const Operation& operation) {
  for (const LayoutCase& row : operation.layouts) {
    const bool first = &row == &operation.layouts.front();
    text += fmt::format("| {} | {} | {} | {} | {} | {} | {} |\n",
                        first ? fmt::format("`{}`", operation.name) : "",
                        first ? sizes_of(operation) : "", row.operands, row.results, row.forward,
                        row.gradients, row.backward);
  }
}

}  // namespace

std::vector<Family> families() {
  std::vector<Family> all;
  for (const auto part :
       {elementwise_families, matmul_families, reduction_families, normalisation_families,
        view_families, indexing_families, network_families, fused_families, optimizer_families}) {
    auto families = part();
    all.insert(all.end(), std::make_move_iterator(families.begin()),
               std::make_move_iterator(families.end()));
  }
  return all;
}

std::string render(const std::vector<Family>& families) {
  std::string text = kIntroduction;
  for (const auto& family : families) {
    text += fmt::format("\n## {}\n\n", family.name);
    text +=
        "| operator | sizes | inputs | results | forward | gradients | backward |\n"
        "|---|---|---|---|---|---|---|\n";
    for (const auto& operation : family.operations) {
      add_operation(text, operation);
    }
  }
  return text;
}

}  // namespace tessera::testing
