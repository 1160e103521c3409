#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>

#include "family_table.h"
#include "tessera/dtensor/communication_scope.h"
#include "tessera/dtensor/random.h"
#include "testing/distributed.h"
#include "testing/layouts.h"

namespace tessera::testing {
namespace {

constexpr const char* kIntroduction =
    R"(# What each family of operators communicates

The tests in `tests/dtensor/family/` run each row of the tables on this page, forward and backward, on 4
ranks, compare the values with libtorch's values on one rank, and count the collectives in the communicator.
After a change of a sharding rule, run `family_test` with `TESSERA_UPDATE_DOCS=1`, which writes this page.
[operators.md](operators/operators.md) lists every operator overload that has a sharding rule.

In the tables, `S0` means `Shard(0)`, `R` means `Replicate()`, `P` means `Partial(sum)`, and `Pmax` means
`Partial(max)`; a comma separates mesh dimensions. A table row without a comma in the placements is for a mesh
of 4 ranks, and a row with a comma is for a mesh of 2 × 2 ranks. All tensors have elements of type double. The
bytes of a collective are the bytes that one rank contributes; `2 all_reduce 128` means two calls with 128
bytes together, and `-` means no collective. The column "gradients" has the placements of the inputs'
gradients, if the gradient of the result has the result's placements (`R` instead of `P`); `-` means no
gradient.
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

/// Results and gradients of an operation. An operand's gradient is undefined if autograd computes
/// none.
struct Outcome {
  Tensors results, gradients;
  std::string layout_of_results, layout_of_gradients;
  std::string forward, backward;
};

std::string text_of(const Placement& placement) {
  if (is_replicate(placement)) {
    return "R";
  }
  if (const auto* shard = std::get_if<Shard>(&placement)) {
    return fmt::format("S{}", shard->dim);
  }
  if (const auto* partial = std::get_if<Partial>(&placement)) {
    return partial->op == ReduceOp::kSum ? "P" : "P" + to_string(partial->op);
  }
  return to_string(placement);
}

std::string layout_of(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "-";
  }
  if (!tessera::is_distributed(tensor)) {
    return "plain";
  }
  std::string text;
  for (const auto& placement : DistributedTensor(tensor).placements()) {
    text += (text.empty() ? "" : ",") + text_of(placement);
  }
  return text;
}

std::string layouts_of(const Tensors& tensors) {
  std::string text;
  for (const auto& tensor : tensors) {
    text += (text.empty() ? "" : " ") + layout_of(tensor);
  }
  return text;
}

/// Formats the number of calls and bytes of each collective, summed over all process groups.
std::string describe(const CommunicationScope& scope) {
  std::map<std::string, comm::Traffic> sums;
  for (const auto& [key, traffic] : scope.table()) {
    sums[key.second].calls += traffic.calls;
    sums[key.second].bytes += traffic.bytes;
  }
  std::string text;
  for (const auto& [collective, traffic] : sums) {
    if (traffic.calls == 0) {
      continue;
    }
    if (!text.empty()) {
      text += ", ";
    }
    if (traffic.calls > 1) {
      text += fmt::format("{} ", traffic.calls);
    }
    text += fmt::format("{} {}", collective, traffic.bytes);
  }
  return text.empty() ? "-" : text;
}

at::Tensor value_of(const Operand& operand, int seed) {
  const at::Tensor reals = values(operand.sizes, seed);
  switch (operand.kind) {
    case Operand::kReals:
      return reals;
    case Operand::kPositive:
      return reals.abs().add(0.5);
    case Operand::kMask:
      return reals.gt(0);
    case Operand::kIndices:
      return reals.mul(1000).abs().to(at::kLong).remainder(operand.limit);
  }
  return {};
}

Tensors values_of(const Operation& operation) {
  Tensors all;
  for (const Operand& operand : operation.operands) {
    all.push_back(value_of(operand, static_cast<int>(all.size())));
  }
  return all;
}

Tensors full_tensors(const Tensors& tensors) {
  Tensors result;
  for (const auto& tensor : tensors) {
    result.push_back(full_tensor(tensor));
  }
  return result;
}

at::Tensor gradient_for(const at::Tensor& result, int seed) {
  const at::Tensor gradient = values(result.sizes(), seed);
  if (!tessera::is_distributed(result)) {
    return gradient;
  }
  Placements placements = DistributedTensor(result).placements();
  for (Placement& placement : placements) {
    if (is_partial(placement)) {
      placement = Replicate{};
    }
  }
  return distribute_tensor(gradient, DistributedTensor(result).mesh(), placements);
}

Tensors gradients_of(const Tensors& results, const Tensors& operands) {
  Tensors roots, seeds, inputs;
  for (const auto& result : results) {
    if (!result.requires_grad()) {
      continue;
    }
    seeds.push_back(gradient_for(result, 5 + static_cast<int>(roots.size())));
    roots.push_back(result);
  }
  for (const auto& operand : operands) {
    if (operand.requires_grad()) {
      inputs.push_back(operand);
    }
  }
  return torch::autograd::grad(roots, inputs, seeds, /*retain_graph=*/false,
                               /*create_graph=*/false, /*allow_unused=*/true);
}

/// Runs the operation. Floating-point operands require gradients, but are no autograd leaves,
/// because autograd redistributes a leaf's gradient to the leaf's layout.
Outcome run(const Operation& operation, Tensors operands, const DeviceMesh* mesh) {
  for (std::size_t i = 0; i < operands.size(); ++i) {
    const bool real = operation.operands[i].kind <= Operand::kPositive;
    if (operation.differentiable && real) {
      operands[i] = operands[i].detach().requires_grad_().view_as(operands[i]);
    }
  }
  Outcome outcome;
  Tensors results, gradients;
  const auto count = [&](const auto& work) -> std::string {
    if (mesh == nullptr) {
      return work(), "-";
    }
    const CommunicationScope scope(*mesh);
    work();
    return describe(scope);
  };
  outcome.forward = count([&] { results = operation.run(operands); });
  outcome.layout_of_results = layouts_of(results);
  outcome.results = full_tensors(results);
  if (!operation.differentiable) {
    return outcome;
  }
  outcome.backward = count([&] { gradients = gradients_of(results, operands); });
  outcome.layout_of_gradients = layouts_of(gradients);
  outcome.gradients = full_tensors(gradients);
  return outcome;
}

Tensors distribute(const Tensors& values, const std::string& layouts, const DeviceMesh& mesh) {
  const auto each = split(layouts, ' ');
  Tensors result;
  for (std::size_t i = 0; i < values.size(); ++i) {
    result.push_back(distribute_tensor(values[i], mesh, placements_of(each.at(i))));
  }
  return result;
}

std::string replicated(const Operation& operation, const DeviceMesh& mesh) {
  std::string text;
  for (std::size_t i = 0; i < operation.operands.size(); ++i) {
    text += mesh.ndim() == 1 ? "R " : "R,R ";
  }
  return text;
}

Outcome run_as(const Operation& operation, const std::string& layouts, const DeviceMesh& mesh) {
  if (operation.random) {
    manual_seed(7);
  }
  return run(operation, distribute(values_of(operation), layouts, mesh), &mesh);
}

/// Runs the operation on plain operands or, if the operation is random, on replicated operands.
Outcome expected_of(const Operation& operation, const DeviceMesh& mesh) {
  if (operation.random) {
    return run_as(operation, replicated(operation, mesh), mesh);
  }
  return run(operation, values_of(operation), nullptr);
}

}  // namespace

std::vector<LayoutCase> Family::layouts_of_rows(const std::vector<std::string>& rows) {
  std::vector<LayoutCase> layouts;
  for (const std::string& row : rows) {
    std::vector<std::string> cells;
    std::size_t begin = 0;
    for (std::size_t end = 0; end != std::string::npos; begin = end + 3) {
      end = row.find(" | ", begin);
      cells.push_back(row.substr(begin, end - begin));
    }
    cells.resize(5);
    layouts.push_back({cells[0], cells[1], cells[2], cells[3], cells[4]});
  }
  return layouts;
}

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

namespace tessera {

namespace {

using testing::Family;
using testing::LayoutCase;
using testing::Operation;
using testing::Tensors;

void expect_same(const Tensors& found, const Tensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].defined(), expected[i].defined()) << i;
    if (!found[i].defined()) {
      continue;
    }
    ASSERT_EQ(found[i].sizes(), expected[i].sizes()) << i;
    EXPECT_TRUE(at::allclose(found[i].to(at::kDouble), expected[i].to(at::kDouble), 1e-9, 1e-12))
        << i << ": " << found[i] << "\nexpected\n"
        << expected[i];
  }
}

void check(const Operation& operation, const LayoutCase& row, const DeviceMesh& mesh) {
  SCOPED_TRACE(fmt::format("{} of {}", operation.name, row.operands));
  const auto expected = testing::expected_of(operation, mesh);
  const auto found = testing::run_as(operation, row.operands, mesh);
  EXPECT_EQ(found.layout_of_results, row.results);
  EXPECT_EQ(found.forward, row.forward);
  EXPECT_EQ(found.layout_of_gradients, row.gradients);
  EXPECT_EQ(found.backward, row.backward);
  expect_same(found.results, expected.results);
  expect_same(found.gradients, expected.gradients);
}

class FamilyTable : public ::testing::TestWithParam<Family> {};

TEST_P(FamilyTable, ListsTheActualCommunication) {
  RunOnMesh({4}, {"x"}, [](Rank& rank, const DeviceMesh& line) {
    const auto square = rank.mesh({2, 2}, {"x", "y"});
    for (const auto& operation : GetParam().operations) {
      for (const LayoutCase& row : operation.layouts) {
        const bool on_square = row.operands.find(',') != std::string::npos;
        check(operation, row, on_square ? square : line);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, FamilyTable, ::testing::ValuesIn(testing::families()),
                         testing::name_of_case<Family>);

TEST(FamilyTableDocumentation, MatchesTheTable) {
  const auto text = render(testing::families());
  if (std::getenv("TESSERA_UPDATE_DOCS") != nullptr) {
    std::ofstream(TESSERA_RULES_DOC) << text;
  }
  std::ifstream file(TESSERA_RULES_DOC);
  const std::string found{std::istreambuf_iterator<char>(file), {}};
  EXPECT_TRUE(found == text) << "docs/sharding_rules.md is out of date: run this test with "
                                "TESSERA_UPDATE_DOCS=1 in the environment";
}

}  // namespace
}  // namespace tessera
