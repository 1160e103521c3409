// Tests mixtures of experts. On one rank, libtorch's operators are the reference. On meshes with a
// dimension "ep", one rank is the reference. Also tests traffic and refused calls.

#include "tessera/nn/experts.h"

#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <numeric>
#include <optional>

#include "tessera/dtensor/detail/experts.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip_grad.h"
#include "testing/distributed.h"

namespace tessera::fsdp::experts {
namespace {

constexpr std::int64_t kDim = 16, kRows = 24;

struct Network : nn::Module<Network> {
  explicit Network(const nn::ExpertsOptions& options)
      : first(*this, "first", options), second(*this, "second", options) {}
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor inner = input(x);
    const at::Tensor between = inner + first(inner);
    return between + second(dropout > 0 ? at::dropout(between, dropout, /*train=*/true) : between);
  }
  double dropout = 0;
  nn::Child<nn::Linear> input{*this, "input", kDim, kDim};
  nn::Child<nn::MixtureOfExperts> first, second;
};

struct Case {
  std::string name = "usual";
  std::function<void(nn::ExpertsOptions&)> options = [](nn::ExpertsOptions&) {};
  int accumulation = 1;
  std::optional<nn::CheckpointOptions> recompute{};
  std::int64_t lora = 0;    ///< rank of the experts' adapters
  double bias_of_3 = 0;     ///< expert 3's selection bias
  bool first_idle = false;  ///< whether rank 0 gets no rows of the batch
  double dropout = 0;       ///< dropout probability of activations and of adapter inputs
  bool ema = false;         ///< whether to compare averages of the weights (EMA)
  std::vector<std::vector<std::int64_t>> meshes{{2, 2}};  ///< sizes (dp, ep) or (replicas, dp, ep)
};

nn::ExpertsOptions options_of(const Case& test) {
  nn::ExpertsOptions options{.hidden = kDim, .inner = 12, .experts = 8, .init_std = 0.3};
  test.options(options);
  return options;
}

struct Curve {
  std::vector<double> numbers;
  std::vector<at::Tensor> weights;
};

/// The meshes for expert parameters, for all other parameters, and for expert parallelism (ep).
struct Meshes {
  explicit Meshes(const DeviceMesh& mesh)
      : experts(mesh["dp"]), all(mesh[{"dp", "ep"}].flatten("all")), ep(mesh["ep"]) {
    if (mesh.ndim() == 3) {
      experts = mesh[{"replicas", "dp"}];
      all = DeviceMesh::concatenate({mesh["replicas"], all});
    }
  }
  DeviceMesh experts, all, ep;
};

std::shared_ptr<Network> make_network(const Case& test, const Meshes* meshes) {
  auto network = [&] {
    const nn::MetaDevice meta;
    return std::make_shared<Network>(options_of(test));
  }();
  if (test.lora > 0) {
    nn::apply_lora(
        *network,
        {.rank = test.lora, .alpha = 6, .targets = {"**.experts.*"}, .dropout = test.dropout});
  }
  network->to(at::kDouble);
  if (meshes != nullptr) {
    EXPECT_EQ(nn::apply_expert_parallel(*network, meshes->ep), 2);
  }
  if (test.recompute) {
    nn::apply_activation_checkpointing(*network, nn::of_class<nn::MixtureOfExperts>(),
                                       *test.recompute);
  }
  if (meshes != nullptr) {
    Options options;
    options.parameter_mesh = [mesh = meshes->experts](const std::string& name, const at::Tensor&) {
      return name.starts_with("experts.") ? std::optional(mesh) : std::nullopt;
    };
    fully_shard(*network->first, meshes->all, options);
    fully_shard(*network->second, meshes->all, options);
    fully_shard(*network, meshes->all);
  }
  nn::to_empty(*network, at::kCPU);
  nn::init_weights(*network, /*seed=*/7);
  for (const auto* mixture : {&network->first, &network->second}) {
    if (test.bias_of_3 != 0) {
      (*mixture)->selection_bias->select(0, 3).fill_(test.bias_of_3);
    }
  }
  return network;
}

at::Tensor mean_over(const at::Tensor& value, const DeviceMesh& mesh) {
  at::Tensor sum = value.detach().clone();
  if (mesh) {
    mesh.group_of_all_ranks().all_reduce(sum, ReduceOp::kSum)->wait();
  }
  return sum / (mesh ? mesh.size() : 1);
}

at::Tensor own_rows(const Case& test, const at::Tensor& all, std::int64_t index,
                    std::int64_t count) {
  const std::int64_t idle = test.first_idle && count > 1 ? 1 : 0;
  const std::int64_t rows = kRows / (count - idle);
  return index < idle ? all.narrow(0, 0, 0) : all.narrow(0, (index - idle) * rows, rows);
}

Curve train(const Case& test, const Meshes* meshes, std::int64_t index, std::int64_t count) {
  const std::shared_ptr<Network> network = make_network(test, meshes);
  network->dropout = test.dropout;
  tessera::manual_seed(3);
  std::optional<BatchPart> whole;
  if (meshes == nullptr) {
    whole.emplace(0, 1);
  }
  const DeviceMesh all = meshes != nullptr ? meshes->all : DeviceMesh();
  std::shared_ptr<optim::Optimizer> optimizer =
      std::make_shared<optim::AdamW>(*network, optim::AdamWOptions{.lr = 1e-2, .eps = 1e-4});
  const auto ema = test.ema ? std::make_shared<optim::Ema>(optimizer, 0.5) : nullptr;
  optimizer = test.ema ? ema : optimizer;
  Curve curve;
  for (int step = 0; step < 3; ++step) {
    for (int micro = 0; micro < test.accumulation; ++micro) {
      const at::Tensor x = uniform_values({kRows, kDim}, 10 * step + micro).to(at::kDouble);
      const at::Tensor own = own_rows(test, x, index, count);
      const at::Tensor loss = ((*network)(own)-own.flip(1)).square().sum() *
                              (static_cast<double>(count) / (kRows * kDim));
      const nn::RouterLosses router = nn::take_router_losses(*network, all);
      ((loss + 0.1 * router.load_balancing + 0.01 * router.z) / test.accumulation).backward();
      for (const at::Tensor& value : {loss, router.load_balancing, router.z}) {
        curve.numbers.push_back(mean_over(value, all).item<double>());
      }
      curve.numbers.insert(curve.numbers.end(), router.largest_over_mean.begin(),
                           router.largest_over_mean.end());
    }
    curve.numbers.push_back(optim::clip_grad_norm_(optimizer->parameters(), 1.0).item<double>());
    optimizer->step();
    optimizer->zero_grad();
    if (test.bias_of_3 == 0) {
      nn::update_selection_bias(*network, 0.05);
    }
  }
  if (ema != nullptr) {
    ema->swap();
  }
  if (test.lora > 0) {
    const c10::NoGradGuard no_grad;
    network->eval();
    const at::Tensor x = uniform_values({5, kDim}, 1).to(at::kDouble), adapted = (*network)(x);
    nn::merge_lora(*network);
    EXPECT_CLOSE((*network)(x), adapted);
  }
  for (const auto& [name, slot] : network->named_slots()) {
    curve.weights.push_back(full_tensor(slot->persistent()).clone());
  }
  if (network->first->selection_bias.defined()) {
    curve.weights.push_back(*network->first->selection_bias);
  }
  return curve;
}

void expect_equal(const Curve& curve, const Curve& alone) {
  ASSERT_EQ(curve.numbers.size(), alone.numbers.size());
  for (std::size_t i = 0; i < alone.numbers.size(); ++i) {
    EXPECT_NEAR(curve.numbers[i], alone.numbers[i], 1e-6 * std::abs(alone.numbers[i])) << i;
  }
  EXPECT_EACH(curve.weights, alone.weights, 1e-5, 1e-6);
}

class MixturesOnMeshes : public ::testing::TestWithParam<Case> {};

TEST_P(MixturesOnMeshes, TrainLikeOneRank) {
  const Case& test = GetParam();
  const Curve alone = train(test, nullptr, 0, 1);
  for (const std::vector<std::int64_t>& sizes : test.meshes) {
    SCOPED_TRACE(::testing::PrintToString(sizes));
    std::vector<std::string> names{"dp", "ep"};
    names.insert(names.begin(), sizes.size() - 2, "replicas");
    RunOnMesh(sizes, names, [&](Rank& rank, const DeviceMesh& mesh) {
      const Meshes meshes(mesh);
      expect_equal(train(test, &meshes, rank.rank(), rank.size()), alone);
    });
  }
}

using Set = nn::ExpertsOptions;
const std::vector<std::vector<std::int64_t>> kAllMeshes{{1, 2}, {2, 1}, {2, 2},
                                                        {1, 4}, {4, 1}, {3, 2}};
const nn::CheckpointOptions kSelective{.policy = nn::save_matmuls_and_attention()};

INSTANTIATE_TEST_SUITE_P(
    , MixturesOnMeshes,
    ::testing::Values(
        Case{.name = "eight", .meshes = kAllMeshes},
        Case{.name = "six", .options = [](Set& o) { o.experts = 6; }, .meshes = kAllMeshes},
        Case{.name = "three", .options = [](Set& o) { o.experts = 3; }, .meshes = {{1, 4}}},
        Case{.name = "one_nobody_chooses",
             .options = [](Set& o) { o.selection_bias = true; },
             .bias_of_3 = -100},
        Case{.name = "all_to_one",
             .options = [](Set& o) { o.selection_bias = true, o.top_k = 1, o.normalize = false; },
             .bias_of_3 = 100,
             .meshes = {{2, 2}, {1, 4}}},
        Case{.name = "top_all", .options = [](Set& o) { o.top_k = o.experts; }},
        Case{.name = "deepseek",
             .options =
                 [](Set& o) {
                   o.scores = nn::RouterScores::kSigmoid;
                   o.selection_bias = true;
                   o.shared_inner = 20;
                   o.scaling = 2.5;
                 },
             .meshes = {{2, 2}, {1, 4}}},
        Case{.name = "not_normalised", .options = [](Set& o) { o.normalize = false; }},
        Case{.name = "accumulation", .accumulation = 2},
        Case{.name = "replicas", .meshes = {{2, 2, 2}}},
        Case{.name = "recompute", .accumulation = 2, .recompute = nn::CheckpointOptions{}},
        Case{.name = "recompute_some", .recompute = kSelective},
        Case{.name = "idle_rank", .first_idle = true, .meshes = {{2, 2}, {1, 3}, {3, 1}}},
        Case{.name = "dropout", .dropout = 0.3, .meshes = {{2, 2}, {1, 4}}},
        Case{.name = "ema", .ema = true},
        Case{.name = "lora", .lora = 2, .meshes = {{2, 2}, {1, 4}, {3, 2}}},
        Case{.name = "lora_of_six",
             .options = [](Set& o) { o.experts = 6; },
             .lora = 3,
             .meshes = {{1, 4}}}),
    testing::name_of_case<Case>);

/// Computes a mixture of experts by libtorch's operators: every expert computes every row.
struct Expected {
  Expected(nn::MixtureOfExperts& mixture, const at::Tensor& x) {
    const nn::ExpertsOptions& o = mixture.options();
    std::map<std::string, at::Tensor> weight;
    for (const auto& [name, slot] : mixture.named_slots()) {
      weight[name] = slot->get();
    }
    const auto mlp = [&](const at::Tensor& gate, const at::Tensor& up, const at::Tensor& down) {
      return (at::silu(x.mm(gate.t())) * x.mm(up.t())).mm(down.t());
    };
    const at::Tensor logits = x.mm(weight["gate.weight"].t());
    const bool softmax = o.scores == nn::RouterScores::kSoftmax;
    const at::Tensor scores = softmax ? logits.softmax(1) : logits.sigmoid();
    const at::Tensor chosen = std::get<1>(
        (o.selection_bias ? scores + *mixture.selection_bias : scores).detach().topk(o.top_k, 1));
    const at::Tensor mask = at::zeros_like(scores).scatter(1, chosen, 1.0);
    at::Tensor weights = scores * mask;
    weights = (o.normalize ? weights / weights.sum(1, true) : weights) * o.scaling;
    for (std::int64_t e = 0; e < o.experts; ++e) {
      const at::Tensor y =
          mlp(weight["experts.gate_proj.weight"][e], weight["experts.up_proj.weight"][e],
              weight["experts.down_proj.weight"][e]);
      result = (e == 0 ? at::zeros_like(x) : result) + y * weights.select(1, e).unsqueeze(1);
    }
    if (o.shared_inner > 0) {
      result = result + mlp(weight["shared_experts.gate_proj.weight"],
                            weight["shared_experts.up_proj.weight"],
                            weight["shared_experts.down_proj.weight"]);
    }
    const at::Tensor probabilities = softmax ? scores : scores / scores.sum(1, true);
    load = mask.sum(0);
    load_balancing = (load / x.size(0) * probabilities.mean(0)).sum() * o.experts;
    z = at::logsumexp(logits, 1).square().mean();
  }
  at::Tensor result, load, load_balancing, z;
};

TEST(MixtureOfExperts, AuxiliaryLossesOfNoTokensAreZero) {
  nn::MixtureOfExperts mixture({.hidden = 6, .inner = 5, .experts = 4, .init_std = 0.5});
  nn::init_weights(mixture, /*seed=*/3);
  mixture(at::zeros({0, 9, 6}));
  const nn::RouterLosses router = nn::take_router_losses(mixture);
  EXPECT_EQ(router.load_balancing.item<double>(), 0);
  EXPECT_EQ(router.z.item<double>(), 0);
}

TEST(MixtureOfExperts, EqualsPlainOperators) {
  for (const bool deepseek : {false, true}) {
    nn::ExpertsOptions options{.hidden = 6, .inner = 5, .experts = 4, .init_std = 0.5};
    if (deepseek) {
      options.scores = nn::RouterScores::kSigmoid;
      options.selection_bias = true;
      options.shared_inner = 7;
      options.scaling = 2.5;
    }
    nn::MixtureOfExperts mixture(options);
    mixture.to(at::kDouble);
    nn::init_weights(mixture, /*seed=*/3);
    const at::Tensor x = testing::values({2, 9, 6}).requires_grad_();
    for (int round = 0; round < 2; ++round) {
      const at::Tensor result = mixture(x);
      const nn::RouterLosses router = nn::take_router_losses(mixture);
      const Expected expected(mixture, x.flatten(0, 1));
      EXPECT_CLOSE(result.flatten(0, 1), expected.result);
      EXPECT_CLOSE(router.load_balancing, expected.load_balancing);
      EXPECT_CLOSE(router.z, expected.z);
      EXPECT_DOUBLE_EQ(router.largest_over_mean.at(0),
                       (expected.load.max() / expected.load.mean()).item<double>());
      std::vector<at::Tensor> inputs = mixture.parameters();
      inputs.push_back(x);
      const auto gradients = [&](const at::Tensor& y, const at::Tensor& balance,
                                 const at::Tensor& z) {
        return torch::autograd::grad({y.square().sum() + balance + z}, inputs);
      };
      EXPECT_EACH(gradients(result, router.load_balancing, router.z),
                  gradients(expected.result.view_as(result), expected.load_balancing, expected.z),
                  1e-6, 1e-9);
      if (deepseek) {
        const at::Tensor before = mixture.selection_bias->clone();
        nn::update_selection_bias(mixture, 0.1);
        EXPECT_CLOSE((*mixture.selection_bias - before).to(at::kDouble),
                     (expected.load.mean() - expected.load).sign() * 0.1);
      }
    }
  }
}

TEST(MixtureOfExperts, GradientsEqualThoseOfPlainOperators) {
  const std::vector<std::int64_t> counts{3, 0, 2};
  const auto leaf = [](at::IntArrayRef sizes, double seed) {
    return testing::values(sizes, seed).requires_grad_();
  };
  const at::Tensor x = leaf({5, 4}, 1), weight = leaf({3, 6, 4}, 2);
  const at::Tensor plain =
      at::cat({x.narrow(0, 0, 3).mm(weight[0].t()), x.narrow(0, 3, 2).mm(weight[2].t())});
  const at::Tensor grouped = tessera::detail::grouped_linear(x, weight, counts);
  EXPECT_CLOSE(grouped, plain);
  const auto gradients = [](const at::Tensor& y, const std::vector<at::Tensor>& inputs) {
    return torch::autograd::grad({(y * y.detach().sin()).sum()}, inputs);
  };
  EXPECT_EACH(gradients(grouped, {x, weight}), gradients(plain, {x, weight}), 1e-9);
  EXPECT_ERROR(tessera::detail::grouped_linear(x, weight, {3, 0, 1}), "3 counts with the sum 4");

  const at::Tensor order = at::tensor({7, 0, 9, 4, 1, 2, 8, 3, 6, 5}, at::kLong);
  const at::Tensor permuted = tessera::detail::permute_rows(x, order, at::argsort(order), 2);
  const at::Tensor selected = x.index_select(0, order.floor_divide(2));
  EXPECT_EQUAL(permuted, selected);
  EXPECT_EACH(gradients(permuted, {x}), gradients(selected, {x}), 1e-9);
}

TEST(MixtureOfExperts, AppliesDropoutToAdapterInputs) {
  RunOnMesh({2, 2}, {"dp", "ep"}, [](Rank&, const DeviceMesh& mesh) {
    const Meshes meshes(mesh);
    const auto network = make_network({.lora = 2, .dropout = 0.5}, &meshes);
    for (const auto& [name, slot] : network->named_slots()) {
      if (name.ends_with("lora_B.weight")) {
        local_tensor(slot->persistent()).detach().fill_(1);
      }
    }
    const at::Tensor x = uniform_values({5, kDim}, 1).to(at::kDouble), dropped = (*network)(x);
    dropped.sum().backward();
    network->eval();
    EXPECT_FALSE(at::allclose(dropped, (*network)(x)));
  });
}

TEST(AllToAllUneven, ExchangesRowsAndGradients) {
  // Rank r sends counts[r][p] rows to rank p.
  const std::vector<std::vector<std::int64_t>> counts{{2, 0, 3}, {0, 0, 0}, {1, 4, 0}};
  RunOnMesh({3}, {"ep"}, [&](Rank& rank, const DeviceMesh& mesh) {
    const auto own = static_cast<std::size_t>(rank.rank());
    std::vector<std::int64_t> expected, received;
    for (std::size_t from = 0; from < 3; ++from) {
      received.push_back(counts[from][own]);
      std::int64_t row = std::accumulate(counts[from].begin(), counts[from].begin() + rank.rank(),
                                         static_cast<std::int64_t>(100 * from));
      for (std::int64_t i = 0; i < counts[from][own]; ++i) {
        expected.push_back(row++);
      }
    }
    const std::int64_t rows = std::accumulate(counts[own].begin(), counts[own].end(), 0L);
    const at::Tensor within = testing::counting_values({1, 2, 3}).div(10);
    const at::Tensor first = at::arange(rows, at::kDouble).add(100 * rank.rank());
    const at::Tensor x = (first.view({-1, 1, 1}) + within).requires_grad_();
    const auto [y, exchanged] = nn::all_to_all_uneven(x, counts[own], mesh);
    EXPECT_EQ(exchanged.received, received);
    EXPECT_EQUAL(y, at::tensor(expected, at::kDouble).view({-1, 1, 1}) + within);
    (y * y.detach().square()).sum().backward();
    EXPECT_EQUAL(x.grad(), x.detach().square());
  });
}

TEST(AllToAllUneven, SendsLessThanAllGathers) {
  constexpr std::int64_t kTokens = 32, kRanks = 4;
  RunOnMesh({1, kRanks}, {"dp", "ep"}, [&](Rank& rank, const DeviceMesh& mesh) {
    nn::MixtureOfExperts mixture({.hidden = kDim, .inner = 12, .experts = 8});
    nn::apply_expert_parallel(mixture, mesh["ep"]);
    nn::init_weights(mixture, /*seed=*/1);
    const at::Tensor x = uniform_values({kTokens, kDim}, rank.rank()).requires_grad_();
    const Sent exchange(rank);
    const at::Tensor y = mixture(x);
    const comm::Traffic forward = exchange.of("ep", "all_to_all");
    y.sum().backward();
    const comm::Traffic both = exchange.of("ep", "all_to_all");
    EXPECT_EQ(exchange.calls(), both.calls);
    const auto sum = [&](std::int64_t bytes) {
      return static_cast<std::int64_t>(kRanks * mean_over(at::tensor(bytes), mesh).item<double>());
    };
    constexpr std::int64_t kCounts = kRanks * 8 * 8, kRows = kRanks * kTokens * 2 * kDim * 4;
    EXPECT_EQ(forward.calls, 3);
    EXPECT_EQ(sum(forward.bytes), kCounts + 2 * kRows);
    EXPECT_EQ(both.calls, 5);
    EXPECT_EQ(sum(both.bytes), kCounts + 4 * kRows);

    const Sent gathers(rank);
    const at::Tensor all = DistributedTensor::from_local(x, mesh["ep"], {Shard{0}}).full_tensor();
    DistributedTensor::from_local(all, mesh["ep"], {Partial{}}).redistribute({Shard{0}});
    // An all-gather sends a rank's whole input to each other rank. Reduce-scatters and all-to-alls
    // do not send the part that belongs to this rank.
    const double to_others = (kRanks - 1.0) / kRanks;
    const double gathered =
        (kRanks - 1.0) * static_cast<double>(gathers.of("ep", "all_gather").bytes) +
        to_others * static_cast<double>(gathers.of("ep", "reduce_scatter").bytes);
    EXPECT_LE(to_others * static_cast<double>(sum(forward.bytes)) / kRanks, 0.6 * gathered);
  });
}

TEST(MixtureOfExperts, RefusesInvalidCalls) {
  const nn::ExpertsOptions options{.hidden = 4, .inner = 4, .experts = 4};
  const auto with_top_k = [&](std::int64_t top_k) {
    nn::ExpertsOptions other = options;
    other.top_k = top_k;
    return [other] { nn::MixtureOfExperts{other}; };
  };
  RunOnMesh({2}, {"ep"}, [&](const DeviceMesh& mesh) {
    nn::MixtureOfExperts mixture(options);
    nn::init_weights(mixture, /*seed=*/1);
    nn::Linear linear(4, 4);
    const at::Tensor x = at::ones({4, 4});
    testing::expect_refusals(
        {{"top_k", with_top_k(5), {"top_k 5 of 4 experts", "from 1 to 4"}},
         {"no top_k", with_top_k(0), {"top_k 0 of 4 experts"}},
         {"counts", [&] { nn::all_to_all_uneven(x, {1, 2}, mesh); }, {"sum to 3", "4 rows"}},
         {"negative", [&] { nn::all_to_all_uneven(x, {5, -1}, mesh); }, {"[5, -1]", "0 or more"}},
         {"ranks", [&] { nn::all_to_all_uneven(x, {4}, mesh); }, {"1 counts for a mesh of 2"}},
         {"no record", [&] { nn::take_router_losses(mixture); }, {"has not run since"}},
         {"no mixture", [&] { nn::take_router_losses(linear); }, {"has no MixtureOfExperts"}},
         {"plain experts",
          [&] { mixture(distribute_tensor(x, mesh, {Shard{0}}).tensor()); },
          {"call nn::apply_expert_parallel"}}});
    nn::apply_expert_parallel(mixture, mesh);
    EXPECT_ERROR(nn::apply_expert_parallel(mixture, mesh),
                 "apply_expert_parallel: the parameter is already distributed");
  });
}

TEST(MixtureOfExperts, FailsOnAllRanksIfOneRankFails) {
  const std::vector<std::string> errors = testing::ErrorsOfRanks(3, [](Rank& rank) {
    nn::MixtureOfExperts mixture({.hidden = 4, .inner = 4, .experts = 4});
    nn::apply_expert_parallel(mixture, rank.mesh({3}, {"ep"}));
    nn::init_weights(mixture, /*seed=*/1);
    mixture(at::ones({5, rank.rank() == 1 ? 3 : 4}));
  });
  EXPECT_CONTAINS(errors[1], "mat1 and mat2 shapes cannot be multiplied");
  for (const std::string& error : {errors[0], errors[2]}) {
    EXPECT_CONTAINS(error, "rank 1");
  }
}

}  // namespace
}  // namespace tessera::fsdp::experts
