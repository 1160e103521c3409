#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <array>
#include <cmath>
#include <optional>

#include "tessera/comm/trace.h"
#include "tessera/dtensor/random.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "testing/distributed.h"
#include "testing/environment.h"

namespace tessera {

// Tests random operators of at:: on distributed tensors: a seed must give the same whole tensor on
// every mesh.

namespace {

using testing::full_tensor;

using Draw = std::function<at::Tensor(const at::Tensor&)>;

const std::vector<std::int64_t> kSizes{7, 5};

at::Tensor drawn(const Draw& draw, const DeviceMesh& mesh, const Placements& placements) {
  manual_seed(7);
  const at::Tensor x = distribute_tensor(at::full(kSizes, 0.5), mesh, placements);
  draw(x);
  return full_tensor(draw(x));
}

TEST(RandomOperators, DrawTheSameNumbersOnEveryMesh) {
  const std::vector<testing::Named<at::Tensor(const at::Tensor&)>> all{
      {"uniform", [](auto& x) { return x.clone().uniform_(-1, 1); }},
      {"normal", [](auto& x) { return x.clone().normal_(2, 3); }},
      {"bernoulli", [](auto& x) { return x.clone().bernoulli_(0.3); }},
      {"bernoulli_of_tensor", [](auto& x) { return at::bernoulli(x); }},
      {"bernoulli_by_tensor", [](auto& x) { return x.clone().bernoulli_(x); }},
      {"bernoulli_by_row", [](auto& x) { return x.clone().bernoulli_(x.select(0, 0)); }},
      {"bernoulli_of_number", [](auto& x) { return at::bernoulli(x, 0.3); }},
      {"exponential", [](auto& x) { return x.clone().exponential_(); }},
      {"cauchy", [](auto& x) { return x.clone().cauchy_(1, 2); }},
      {"integers_between", [](auto& x) { return at::empty_like(x, at::kInt).random_(-5, 90); }},
      {"rand_like", [](auto& x) { return at::rand_like(x); }},
      {"randn_like", [](auto& x) { return at::randn_like(x); }},
      {"randint_like", [](auto& x) { return at::randint_like(x, 100); }},
      {"dropout", [](auto& x) { return at::dropout(x, 0.3, true); }},
      {"native_dropout", [](auto& x) { return std::get<0>(at::native_dropout(x, 0.3, true)); }},
      {"multinomial", [](auto& x) { return at::multinomial(x, 3); }}};
  std::vector<at::Tensor> expected;
  RunOnMesh({1}, {"x"}, [&](const DeviceMesh& one) {
    for (const auto& [name, draw] : all) {
      expected.push_back(drawn(draw, one, {Replicate{}}));
      EXPECT_GT(std::get<0>(at::_unique(expected.back())).numel(), 1) << name;
    }
  });
  RunOnMesh({4}, {"x"}, [&](Rank& rank, const DeviceMesh& line) {
    const auto square = rank.mesh({2, 2}, {"a", "b"});
    for (std::size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE(all[i].name);
      for (const Placement& placement :
           {Placement(Shard{0}), Placement(Shard{1}), Placement(Partial{})}) {
        EXPECT_EQUAL(drawn(all[i].run, line, {placement}), expected[i]) << to_string(placement);
      }
      EXPECT_EQUAL(drawn(all[i].run, square, {Shard{0}, Shard{0}}), expected[i]);
      EXPECT_EQUAL(drawn(all[i].run, square, {Replicate{}, Shard{1}}), expected[i]);
    }
  });
}

/// Calls every operator that docs/operators/operators.md lists as random.
TEST(RandomOperators, RunInAStrictScopeWithoutTraffic) {
  const testing::DebugChecks none("0");
  RunRanks(4, [](Rank& rank) {
    const at::Tensor x = distribute_tensor(at::ones(kSizes), rank.mesh({4}, {"x"}), {Shard{0}});
    const StrictScope strict;
    at::native_dropout(x, 0.5, true);
    at::rand_like(x);
    at::randn_like(x);
    at::normal_functional(x, 0, 1);
    at::bernoulli(x);
    at::bernoulli(x, 0.5);
    x.clone().bernoulli_(x);
    x.bernoulli_(0.5);
    x.exponential_();
    at::empty_like(x, at::kLong).random_(9);
    x.normal_();
    x.uniform_();
    EXPECT_EQ(comm::total(rank.world()->traffic().table()).calls, 0);
  });
}

/// Whether an operator draws no random numbers, or exists only for GPUs.
bool draws_nothing(const std::string& name) {
  return name.ends_with("_backward") || name == "_fused_sdp_choice" ||
         name == "_scaled_dot_product_flash_attention_for_cpu" ||
         name.find("_triton_") != std::string::npos;
}

// A random operator must call other operators or have a kernel for the dispatch key kRandomKey.
TEST(RandomOperators, AreCompositeOrHaveARandomKernel) {
  std::vector<std::string> unknown;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !name.name.starts_with("aten::") || draws_nothing(name.name.substr(6))) {
      continue;
    }
    const auto& arguments = op->schema().arguments();
    const bool random = op->hasTag(at::Tag::nondeterministic_seeded) ||
                        std::ranges::any_of(arguments, [](const c10::Argument& argument) {
                          return argument.name() == "generator";
                        });
    const auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    const bool kernel = has(c10::DispatchKey::CPU) || has(c10::DispatchKey::CUDA);
    if (random && kernel && !has(detail::kRandomKey) &&
        !has(c10::DispatchKey::CompositeImplicitAutograd) &&
        !has(c10::DispatchKey::CompositeExplicitAutograd)) {
      unknown.push_back(c10::toString(name));
    }
  }
  EXPECT_EQ(unknown, std::vector<std::string>{});
}

TEST(NativeDropout, HasTheSameMaskAndGradientOnEveryMesh) {
  const auto run = [](const DeviceMesh& mesh, const Placements& placements) {
    manual_seed(5);
    const at::Tensor x = distribute_tensor(at::full(kSizes, 3.0), mesh, placements)
                             .tensor()
                             .detach()
                             .requires_grad_();
    const StrictScope strict;
    const auto [y, kept] = at::native_dropout(x, 0.25, true);
    y.sum().backward();
    EXPECT_EQ(kept.scalar_type(), at::kBool);
    return std::array{DistributedTensor(y).full_tensor(), DistributedTensor(kept).full_tensor(),
                      DistributedTensor(x.grad()).full_tensor()};
  };
  RunOnMesh({4}, {"x"}, [&](const DeviceMesh& line) {
    const auto [whole, kept, gradient] = run(line, {Replicate{}});
    EXPECT_TRUE(at::allclose(whole, kept.to(at::kFloat).mul(4)));
    EXPECT_TRUE(at::allclose(gradient, kept.to(at::kFloat).div(0.75)));
    EXPECT_TRUE(kept.any().item<bool>() && !kept.all().item<bool>());
    for (const auto& placement : {Placement{Shard{0}}, Placement{Shard{1}}}) {
      const auto [y, own_kept, own_gradient] = run(line, {placement});
      EXPECT_TRUE(at::equal(y, whole));
      EXPECT_TRUE(at::equal(own_kept, kept));
      EXPECT_TRUE(at::equal(own_gradient, gradient));
    }
  });
}

TEST_ON_MESH(RandomOperators, HaveTheRequestedDistribution, {1}, {"x"}) {
  manual_seed(1);
  const at::Tensor x = distribute_tensor(at::zeros({40'000}), mesh, {Shard{0}});
  const auto mean = [](const at::Tensor& t) {
    return local_tensor(t).to(at::kDouble).mean().item<double>();
  };
  EXPECT_NEAR(mean(x.exponential_(2)), 0.5, 0.02);
  EXPECT_NEAR(mean(x.random_(-5, 90)), 42, 1);
  EXPECT_EQ(local_tensor(x).min().item<double>(), -5);
  EXPECT_EQ(local_tensor(x).max().item<double>(), 89);
  EXPECT_NEAR(mean(at::empty_like(x, at::kBool).bernoulli_(0.3)), 0.3, 0.02);
  EXPECT_NEAR(mean(at::bernoulli(x, 0.3)), 0.3, 0.02);
  EXPECT_NEAR(mean(at::bernoulli(at::full_like(x, 0.3))), 0.3, 0.02);
}

TEST_ON_MESH(RandomOperators, RefuseInvalidParameters, {1}, {"x"}) {
  const at::Tensor x = distribute_tensor(at::zeros({4}), mesh, {Shard{0}});
  EXPECT_ERROR(x.exponential_(0), "the rate is 0");
  EXPECT_ERROR(x.random_(3, 3), "from is 3 and to is 3");
  const auto of = [&x](c10::ScalarType type) { return at::zeros_like(x, type); };
  EXPECT_ERROR(of(at::kChar).random_(0, 300), "Char cannot represent");
  EXPECT_ERROR(of(at::kByte).random_(-5, 5), "Byte cannot represent");
  EXPECT_ERROR(of(at::kLong).random_(0, std::int64_t{1} << 54), "more than 2^53");
  EXPECT_ERROR(x.random_(3, std::optional<std::int64_t>{}), "no upper bound");
  EXPECT_ERROR(of(at::kHalf).uniform_(0, 1e6), "Half cannot represent");
  EXPECT_ERROR(of(at::kDouble).uniform_(0, INFINITY), "Double cannot represent");
  EXPECT_ERROR(of(at::kInt).exponential_(), "cannot fill a tensor of Int");
  EXPECT_ERROR(of(at::kComplexFloat).uniform_(0, 1),
               "uniform_ cannot fill a tensor of ComplexFloat");
  EXPECT_ERROR(of(at::kComplexFloat).normal_(), "normal_ cannot fill a tensor of ComplexFloat");
}

TEST_ON_MESH(RandomOperators, DifferBetweenCallsAndRepeatFromAState, {2}, {"x"}) {
  const at::Tensor x = distribute_tensor(at::zeros(kSizes), mesh, {Shard{0}});
  const auto state = random_state();
  const auto first = DistributedTensor(at::rand_like(x)).full_tensor();
  EXPECT_FALSE(at::equal(DistributedTensor(at::rand_like(x)).full_tensor(), first));
  set_random_state(state);
  EXPECT_EQUAL(at::rand_like(x), first);
}

TEST_ON_MESH(RandomOperators, DrawFromAPassedGenerator, {2}, {"x"}) {
  const auto generator = [] { return at::detail::createCPUGenerator(3); };
  const at::Tensor half = at::full(kSizes, 0.5);
  const at::Tensor x = distribute_tensor(half.clone(), mesh, {Shard{0}});
  const at::Tensor bits = at::bernoulli(half, generator());
  EXPECT_EQUAL(at::bernoulli(x, generator()), bits);
  EXPECT_EQUAL(x.clone().bernoulli_(x, generator()), bits);
  x.uniform_();
  EXPECT_EQUAL(x.uniform_(0, 1, generator()), at::empty(kSizes).uniform_(0, 1, generator()));
}

// The mask of dropout in attention must be the same on every mesh, in forward and backward.

using testing::values;

// The batch size 3 and the sequence length 5 are not multiples of 2 or 4.
const std::vector<std::int64_t> kHeads{3, 4, 5, 8};

/// The result of attention, followed by the gradients of query, key and value.
using Results = std::array<at::Tensor, 4>;

Results attend(const DeviceMesh& mesh, const Placements& placements, bool causal) {
  manual_seed(11);
  std::array<at::Tensor, 3> inputs;
  for (int i = 0; i < 3; ++i) {
    inputs[static_cast<std::size_t>(i)] =
        distribute_tensor(values(kHeads, i), mesh, placements).tensor().detach().requires_grad_();
  }
  const auto& [query, key, value] = inputs;
  const at::Tensor result =
      at::scaled_dot_product_attention(query, key, value, {}, /*dropout_p=*/0.4, causal);
  result.mul(result).sum().backward();
  return {full_tensor(result.detach()), full_tensor(query.grad()), full_tensor(key.grad()),
          full_tensor(value.grad())};
}

void expect_same(const Results& found, const Results& expected, const std::string& what) {
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(at::allclose(found[i], expected[i], 1e-9, 1e-12)) << what << ", result " << i;
  }
}

TEST(AttentionDropout, HasTheSameMaskOnEveryMesh) {
  for (const bool causal : {false, true}) {
    Results expected;
    RunOnMesh({1}, {"x"}, [&](const DeviceMesh& one) {
      expected = attend(one, {Replicate{}}, causal);
      const at::Tensor undropped = at::scaled_dot_product_attention(
          values(kHeads, 0), values(kHeads, 1), values(kHeads, 2), {}, 0, causal);
      EXPECT_FALSE(at::allclose(expected[0], undropped));
    });
    RunOnMesh({4}, {"x"}, [&](Rank& rank, const DeviceMesh& line) {
      for (const Placement& placement : {Placement(Replicate{}), Placement(Shard{0}),
                                         Placement(Shard{1}), Placement(Shard{2})}) {
        expect_same(attend(line, {placement}, causal), expected, to_string(placement));
      }
      const DeviceMesh square = rank.mesh({2, 2}, {"dp", "tp"});
      expect_same(attend(square, {Shard{0}, Shard{1}}, causal), expected, "batch and heads");
    });
  }
}

}  // namespace
}  // namespace tessera
