// Tests random redistributions: results, gradients, round trips and sent bytes. Error messages
// contain the mesh and the seed. TESSERA_PROPERTY_CASES: number of redistributions for each mesh
// (default 50).

#include <atomic>
#include <cstdlib>
#include <map>
#include <random>

#include "core/layout/oracle.h"
#include "tessera/core/detail/layout.h"
#include "tessera/core/detail/redistribute_plan.h"
#include "tessera/dtensor/communication_scope.h"
#include "testing/distributed.h"
#include "testing/layouts.h"

namespace tessera::testing {

namespace {

at::Tensor combine(const at::Tensor& terms, ReduceOp op) {
  switch (op) {
    case ReduceOp::kMax:
      return terms.amax(0);
    case ReduceOp::kMin:
      return terms.amin(0);
    case ReduceOp::kAvg:
      return terms.mean(0);
    default:
      return terms.sum(0);
  }
}

/// Returns the elements of `whole` at a mesh coordinate, as if Partial dimensions were replicated.
at::Tensor piece(at::Tensor whole, const Layout& layout, const Indices& coordinate) {
  for (int dim = 0; dim < layout.tensor_ndim(); ++dim) {
    const auto indices = layout_indices(layout, dim, whole.size(dim), coordinate);
    whole = whole.index_select(dim, at::tensor(indices, at::kLong));
  }
  return whole;
}

at::Tensor local_of(const at::Tensor& whole, const Layout& layout, const Indices& coordinate) {
  auto local = piece(whole, layout, coordinate);
  for (const auto& partial : layout.partial()) {
    const auto m = pos(partial.mesh_dim);
    local = term(local, partial.op, coordinate[m], layout.mesh_sizes()[m]);
  }
  return local;
}

/// Combines the local tensors of all ranks by the reductions of all Partial mesh dimensions.
std::vector<at::Tensor> reduced(std::vector<at::Tensor> locals, const Layout& layout) {
  const auto all = coordinates(layout.mesh_sizes());
  for (auto partial = layout.partial().rbegin(); partial != layout.partial().rend(); ++partial) {
    std::vector<at::Tensor> next;
    for (auto place : all) {
      place[pos(partial->mesh_dim)] = 0;
      std::vector<at::Tensor> terms;
      for (std::size_t i = 0; i < all.size(); ++i) {
        auto other = all[i];
        other[pos(partial->mesh_dim)] = 0;
        if (other == place) {
          terms.push_back(locals[i]);
        }
      }
      next.push_back(combine(at::stack(terms), partial->op));
    }
    locals = std::move(next);
  }
  return locals;
}

}  // namespace
}  // namespace tessera::testing

namespace tessera {
namespace {

using testing::Indices;
using testing::pos;
using Tensors = std::vector<at::Tensor>;

struct RandomCase {
  Indices sizes;
  LayoutPtr from;
  LayoutPtr to;
};

RandomCase random_case(const Indices& mesh, unsigned seed) {
  const std::vector<ReduceOp> ops{ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin};
  std::mt19937 engine(seed);
  const auto sizes =
      testing::random_sizes(engine, 1 + engine() % 3, {0, 1, 2, 3, 4, 5, 7, 8, 11, 13, 16});
  const auto from = testing::random_layout(engine, mesh, sizes, ops);
  const auto to = testing::random_layout(engine, mesh, sizes, ops);
  return {sizes, from, to};
}

std::string describe(const RandomCase& c, unsigned seed) {
  return "seed " + std::to_string(seed) + ": " + to_string(*c.from) + " -> " + to_string(*c.to) +
         " of " + ::testing::PrintToString(c.sizes);
}

at::Tensor whole_of(const Indices& sizes) {
  return testing::counting_values(sizes).sub(5);
}

at::Tensor weights_of(const Indices& sizes) {
  return whole_of(sizes).remainder(7).add(1);
}

bool averages(const Layout& layout) {
  return std::any_of(layout.partial().begin(), layout.partial().end(),
                     [](const auto& partial) { return partial.op == ReduceOp::kAvg; });
}

/// Reduces Partial `locals`, and compares them with the shards of `whole`; bitwise if `exact`.
void expect_parts(const Tensors& locals, const at::Tensor& whole, const Layout& layout,
                  bool exact) {
  const auto all = testing::coordinates(layout.mesh_sizes());
  const auto found = testing::reduced(locals, layout);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto expected = testing::piece(whole, layout, all[i]);
    ASSERT_EQ(found[i].sizes(), expected.sizes()) << "rank " << i;
    EXPECT_TRUE(exact ? at::equal(found[i], expected) : at::allclose(found[i], expected, 1e-12))
        << "rank " << i << "\n"
        << found[i] << "\nexpected\n"
        << expected;
  }
}

/// Returns the bytes that a rank sends to itself in the all-to-alls of a redistribution plan.
std::int64_t kept(const RedistributionPlan& plan, const Indices& sizes, const Indices& coordinate) {
  std::int64_t bytes = 0;
  for (const auto& step : plan.steps) {
    if (step.kind != StepKind::kAllToAll) {
      continue;
    }
    std::int64_t both = sizeof(double);
    for (int dim = 0; dim < step.from->tensor_ndim(); ++dim) {
      const auto size = sizes[pos(dim)];
      const auto before = testing::layout_indices(*step.from, dim, size, coordinate);
      const auto after = testing::layout_indices(*step.to, dim, size, coordinate);
      both *= std::count_if(before.begin(), before.end(), [&](std::int64_t index) {
        return std::find(after.begin(), after.end(), index) != after.end();
      });
    }
    bytes += both;
  }
  return bytes;
}

/// Returns the bytes sent by a rank. Process groups in `table` are named by mesh dimensions.
double sent(const comm::TrafficTable& table, const Indices& mesh) {
  double bytes = 0;
  for (const auto& [key, traffic] : table) {
    std::int64_t ranks = 1;
    for (std::size_t m = 0; m < mesh.size(); ++m) {
      if (key.first.find("d" + std::to_string(m)) != std::string::npos) {
        ranks *= mesh[m];
      }
    }
    const auto put = static_cast<double>(traffic.bytes);
    const auto share = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
    std::map<std::string, double> factors{{"all_gather", ranks - 1},
                                          {"reduce_scatter", share},
                                          {"all_reduce", 2 * share},
                                          {"all_to_all", 1}};
    bytes += put * factors[key.second];
  }
  return bytes;
}

struct Outcome {
  Tensors moved, back, gradient;
  LayoutPtr gradient_layout = nullptr;
  std::vector<comm::TrafficTable> there, home;
};

void execute(const RandomCase& c, const DeviceMesh& mesh, std::size_t rank, Outcome& outcome) {
  const auto whole = whole_of(c.sizes);
  const auto local = testing::local_of(whole, *c.from, mesh.coordinate());
  auto leaf = DistributedTensor::from_local(local, ShardingSpec{mesh, c.from}, c.sizes);
  leaf.tensor().requires_grad_();
  const CommunicationScope there(mesh);
  const auto moved = leaf.redistribute(c.to);
  outcome.there[rank] = there.table();
  const CommunicationScope home(mesh);
  outcome.back[rank] = local_tensor(moved.redistribute(c.from)).clone();
  outcome.home[rank] = home.table();
  outcome.moved[rank] = local_tensor(moved).clone();
  const Placements replicated(c.from->mesh_sizes().size(), Replicate{});
  const at::Tensor weights = distribute_tensor(weights_of(c.sizes), mesh, replicated);
  moved.tensor().mul(moved.tensor()).mul(weights).sum().backward();
  outcome.gradient[rank] = local_tensor(leaf.tensor().grad());
  if (rank == 0) {
    outcome.gradient_layout = DistributedTensor(leaf.tensor().grad()).layout();
  }
}

void expect_bytes(const std::vector<comm::TrafficTable>& tables, const RandomCase& c) {
  const auto plan = plan_redistribution(c.from, c.to, c.sizes, sizeof(double));
  const auto all = testing::coordinates(c.from->mesh_sizes());
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto bytes = sent(tables[i], c.from->mesh_sizes());
    EXPECT_LE(bytes - static_cast<double>(kept(plan, c.sizes, all[i])),
              static_cast<double>(plan.bytes()) + 1e-6)
        << "rank " << i << " of\n"
        << to_string(plan);
  }
}

void check(const RandomCase& c, const Outcome& outcome) {
  const auto whole = whole_of(c.sizes);
  const bool exact = !averages(*c.from) && !averages(*c.to);
  expect_parts(outcome.moved, whole, *c.to, exact);
  expect_parts(outcome.back, whole, *c.from, exact);
  expect_bytes(outcome.there, c);
  expect_bytes(outcome.home, {c.sizes, c.to, c.from});
  const auto plain = whole.clone().requires_grad_();
  plain.mul(plain).mul(weights_of(c.sizes)).sum().backward();
  const auto layout = Layout::intern(c.from->mesh_sizes(), c.from->dims());
  ASSERT_EQ(outcome.gradient_layout, layout);
  expect_parts(outcome.gradient, plain.grad(), *layout, exact);
}

unsigned cases_per_mesh() {
  const char* text = std::getenv("TESSERA_PROPERTY_CASES");
  return text == nullptr ? 50 : static_cast<unsigned>(std::stoul(text));
}

class RedistributeProperty : public ::testing::TestWithParam<Indices> {};

TEST_P(RedistributeProperty, RoundTripsWithCorrectGradients) {
  const auto& sizes = GetParam();
  const auto ranks = testing::coordinates(sizes).size();
  const auto first = static_cast<unsigned>(sizes.size() * 1000000 + ranks * 100000);
  std::vector<Outcome> outcomes(cases_per_mesh());
  for (auto& o : outcomes) {
    o.moved = o.back = o.gradient = Tensors(ranks);
    o.there = o.home = std::vector<comm::TrafficTable>(ranks);
  }
  std::atomic<unsigned> running{first};
  try {
    RunRanks(static_cast<int>(ranks), [&](Rank& rank) {
      std::vector<std::string> names;
      for (std::size_t m = 0; m < sizes.size(); ++m) {
        names.push_back("d" + std::to_string(m));
      }
      const auto mesh = rank.mesh(sizes, names);
      for (unsigned i = 0; i < outcomes.size(); ++i) {
        running = first + i;
        execute(random_case(sizes, first + i), mesh, pos(rank.rank()), outcomes[i]);
      }
    });
  } catch (const std::exception& error) {
    FAIL() << describe(random_case(sizes, running), running) << "\n" << error.what();
  }
  for (unsigned i = 0; i < outcomes.size() && !HasFailure(); ++i) {
    const auto c = random_case(sizes, first + i);
    SCOPED_TRACE(describe(c, first + i));
    check(c, outcomes[i]);
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, RedistributeProperty,
                         ::testing::Values(Indices{4}, Indices{2, 2}, Indices{1, 4}, Indices{2, 3},
                                           Indices{3, 2}, Indices{2, 2, 2}, Indices{3, 1, 2}));

}  // namespace
}  // namespace tessera
