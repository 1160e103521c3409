#include <ATen/ScalarOps.h>

#include "tessera/comm/communicator.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/factories.h"
#include "tessera/dtensor/local_map.h"
#include "testing/distributed.h"
#include "testing/environment.h"

namespace tessera {
namespace {

using testing::counting_values;
using testing::kInfinity;

DeviceMesh one_rank() {
  return init_device_mesh(comm::fake_world(0, 1), {1}, {"x"});
}

TEST(Wrapper, HasGlobalSizesAndStridesInLocalOrder) {
  const auto mesh = init_device_mesh(comm::fake_world(1, 4), {4}, {"x"});
  const auto t = DistributedTensor::from_local(at::zeros({3, 2}), mesh, {Shard{0}});
  EXPECT_EQ(t.tensor().sizes(), (std::vector<std::int64_t>{12, 2}));
  EXPECT_EQ(t.tensor().strides(), (std::vector<std::int64_t>{2, 1}));
  EXPECT_FALSE(t.tensor().has_storage());
  const auto turned = DistributedTensor::from_local(at::zeros({3, 2}).t(), mesh, {Shard{0}});
  EXPECT_EQ(turned.tensor().strides(), (std::vector<std::int64_t>{1, 8}));
}

TEST(Wrapper, RefusesDataPointers) {
  const auto t = distribute_tensor(at::zeros({2}), one_rank(), {Replicate{}});
  EXPECT_THROWN(c10::Error, t.tensor().data_ptr(),
                "the memory of a distributed tensor was accessed");
  EXPECT_THROWN(c10::Error, t.tensor().storage(),
                "Cannot access storage of a tessera::DistributedTensor");
}

TEST_ON_MESH(Wrapper, SharesMemoryOnlyIfReplicated, {2}, {"x"}) {
  const at::Tensor source = at::zeros({4});
  const auto all = distribute_tensor(source, mesh, {Replicate{}});
  const auto part = distribute_tensor(source, mesh, {Shard{0}});
  const auto copy = distribute_tensor(source.clone(), mesh, {Replicate{}});
  source.add_(1);
  EXPECT_EQ(all.to_local()[0].item<float>(), 1);
  EXPECT_EQ(part.to_local()[0].item<float>(), 0);
  EXPECT_EQ(copy.to_local()[0].item<float>(), 0);
  const auto alone = distribute_tensor(source, one_rank(), {Shard{0}});
  source.add_(1);
  EXPECT_EQ(alone.to_local()[0].item<float>(), 1);
}

TEST(Wrapper, SharesItsVersionWithTheLocalTensor) {
  const auto local = at::zeros({2});
  const auto t = DistributedTensor::from_local(local, one_rank(), {Replicate{}});
  const auto before = t.tensor()._version();
  local.add_(1);
  EXPECT_EQ(t.tensor()._version(), before + 1);
  t.tensor().add_(1);
  EXPECT_EQ(local._version(), before + 2);
  EXPECT_EQ(local[0].item<float>(), 2);
}

TEST(Wrapper, DetectsWritesToTheLocalTensorBeforeBackward) {
  const auto t = distribute_tensor(counting_values({2, 2}), one_rank(), {Replicate{}});
  const at::Tensor leaf = t.tensor().detach().requires_grad_();
  const auto loss = leaf.mul(leaf).sum();
  local_tensor(leaf).add_(1);
  EXPECT_THROWN(c10::Error, loss.backward(), "modified by an inplace operation");
}

TEST(SetData, RefusesToMixPlainAndDistributedTensors) {
  const auto t = distribute_tensor(at::zeros({2}), one_rank(), {Replicate{}});
  at::Tensor ours = t, plain = at::zeros({2});
  EXPECT_ERROR(ours.set_data(plain), "set_data");
  EXPECT_ERROR(plain.set_data(ours), "set_data");
  EXPECT_EQ(at::add(plain, 1)[0].item<float>(), 1);
}

TEST(SetData, AcceptsADistributedTensorOfAnotherType) {
  at::Tensor a = distribute_tensor(at::zeros({2}), one_rank(), {Replicate{}});
  at::Tensor b = distribute_tensor(at::ones({3}), one_rank(), {Replicate{}});
  a.set_data(b);
  EXPECT_EQ(a.numel(), 3);
  EXPECT_TRUE(at::equal(local_tensor(a), at::ones({3})));
  const auto t = distribute_tensor(counting_values({2, 3}), one_rank(), {Shard{0}});
  at::Tensor leaf = t.tensor().detach().requires_grad_();
  leaf.set_data(leaf.to(at::kDouble));
  EXPECT_EQ(leaf.scalar_type(), at::kDouble);
  EXPECT_EQ(local_tensor(leaf).scalar_type(), at::kDouble);
  leaf.square().sum().backward();
  EXPECT_TRUE(local_tensor(leaf.grad()).equal(counting_values({2, 3}).to(at::kDouble).mul(2)));
}

// An in-place operator may change its tensor's layout. If no data are sent between ranks, the
// tensor keeps its memory, possibly with other strides.

using testing::values;

const std::vector<ReduceOp> kEveryReduction{ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax,
                                            ReduceOp::kMin, ReduceOp::kProduct};

/// Returns Replicate, Shard of each dimension below `dims`, and Partial with each reduction.
std::vector<Placement> placements_of(std::int64_t dims) {
  std::vector<Placement> all{Replicate{}};
  for (std::int64_t dim = 0; dim < dims; ++dim) {
    all.emplace_back(Shard{dim});
  }
  for (const auto op : kEveryReduction) {
    all.emplace_back(Partial{op});
  }
  return all;
}

TEST_ON_RANKS(WriteToTransposedView, ReachesTheBaseOnAOneRankDimension, 3) {
  const auto expected = values({2, 7}).sin();
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{1, 3}, {3, 1}}) {
    const auto mesh = rank.mesh(sizes, {"a", "b"});
    for (const auto op : kEveryReduction) {
      for (const auto& placements :
           {Placements{Partial{op}, Shard{1}}, Placements{Shard{1}, Partial{op}}}) {
        const auto x = distribute_tensor(values({2, 7}), mesh, placements).tensor().detach();
        x.movedim(0, -1).sin_();
        EXPECT_CLOSE(x, expected) << to_string(placements);
      }
    }
  }
}

// A C++ number must not promote the dtype of a distributed tensor. A Partial sum times infinity
// must equal the reduced value times infinity.

using WithNumber = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& number)>;

/// Compares the dtype and the values of run(x, number) for a distributed x and for the plain x.
void expect_types_of_libtorch(const DeviceMesh& mesh, const WithNumber& run, const at::Tensor& x,
                              const at::Scalar& number) {
  const auto expected = run(x.clone(), at::native::wrapped_scalar_tensor(number));
  for (const auto& placement : placements_of(std::min<std::int64_t>(x.dim(), 1))) {
    if (!x.is_floating_point() && placement == Placement(Partial{ReduceOp::kAvg})) {
      continue;
    }
    const auto spread = distribute_tensor(x.clone(), mesh, {placement}).tensor().detach();
    const auto found = run(spread, at::native::wrapped_scalar_tensor(number));
    EXPECT_EQ(found.scalar_type(), expected.scalar_type())
        << x.scalar_type() << " " << to_string(placement) << " " << number;
    EXPECT_EQ(local_tensor(found).scalar_type(), expected.scalar_type());
    EXPECT_CLOSE(found, expected) << to_string(placement);
  }
}

TEST_ON_MESH(WrappedNumbers, PromoteTypesLikeLibtorch, {3}, {"x"}) {
  const std::vector<testing::Named<at::Tensor(const at::Tensor&, const at::Tensor&)>> all{
      {"add", [](auto& x, auto& n) { return at::add(x, n); }},
      {"subtracted", [](auto& x, auto& n) { return at::sub(n, x); }},
      {"mul", [](auto& x, auto& n) { return at::mul(x, n); }},
      {"div", [](auto& x, auto& n) { return at::div(x, n); }},
      {"divided", [](auto& x, auto& n) { return at::div(n, x); }},
      {"pow", [](auto& x, auto& n) { return at::pow(x, n); }},
      {"where", [](auto& x, auto& n) { return at::where(x.gt(0), x, n); }},
      {"gt", [](auto& x, auto& n) { return at::gt(x, n); }},
      {"add_in_place",
       [](auto& x, auto& n) { return x.is_floating_point() ? x.add_(n) : x.add(n); }},
      {"of_a_list",
       [](auto& x, auto& n) { return at::stack(at::_foreach_add({x, x}, at::Scalar(n.item()))); }}};
  for (const auto& [name, run] : all) {
    SCOPED_TRACE(name);
    for (const auto type : {at::kInt, at::kLong, at::kFloat, at::kBFloat16, at::kDouble}) {
      for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{}, {5, 2}}) {
        for (const at::Scalar& number : {at::Scalar(2), at::Scalar(1.5)}) {
          expect_types_of_libtorch(mesh, run, at::full(sizes, 3, type), number);
        }
      }
    }
  }
}

at::Tensor wrapped(double number) {
  return at::native::wrapped_scalar_tensor(number);
}

/// Each element is a sum of positive and negative terms. If every rank multiplied its term by
/// infinity, the sum would be inf - inf = NaN.
TEST_ON_MESH(PartialSums, HandleInfiniteFactors, {3}, {"x"}) {
  const std::vector<testing::Named<at::Tensor(at::Tensor)>> all{
      {"mul", [](auto x) { return at::mul(x, kInfinity); }},
      {"mul_in_place", [](auto x) { return x.mul_(-kInfinity); }},
      {"mul_wrapped", [](auto x) { return at::mul(x, wrapped(kInfinity)); }},
      {"mul_wrapped_in_place", [](auto x) { return x.mul_(wrapped(kInfinity)); }},
      {"div", [](auto x) { return at::div(x, 0.0); }},
      {"div_wrapped", [](auto x) { return at::div(x, wrapped(0.0)); }},
      {"add_with_alpha", [](auto x) { return at::add(at::zeros_like(x), x, kInfinity); }},
      {"list", [](auto x) { return at::_foreach_mul({x}, kInfinity)[0]; }},
      {"list_div", [](auto x) { return at::_foreach_div({x}, 0.0)[0]; }},
      {"list_of_numbers", [](auto x) {
         at::_foreach_mul_({x}, at::ArrayRef<at::Scalar>({kInfinity}));
         return x;
       }}};
  const auto value = at::tensor({1.0, -2.0, 3.0});
  const auto term = value * (rank.rank() == 0 ? -3.0 : 2.0);
  const auto spread = [&](ReduceOp op, double scale) {
    return DistributedTensor::from_local(term * scale, mesh, {Partial{op}}).tensor().detach();
  };
  for (const auto& [name, run] : all) {
    const auto expected = run(value.clone());
    for (const auto& x : {spread(ReduceOp::kSum, 1), spread(ReduceOp::kAvg, 3)}) {
      run(x.clone().mul_(2.0));
      EXPECT_EQUAL(run(x.clone()), expected) << name;
    }
  }
}

TEST_ON_MESH(PartialSums, StayPartialForFiniteFactors, {3}, {"x"}) {
  const at::Tensor x = distribute_tensor(values({5}), mesh, {Partial{}});
  const StrictScope strict;
  for (const double factor : {2.0, 0.0, -1e300}) {
    EXPECT_EQ(DistributedTensor(at::mul(x, factor)).placements(), Placements{Partial{}});
  }
  EXPECT_EQ(DistributedTensor(at::div(x, 3.0)).placements(), Placements{Partial{}});
}

// from_local() computes global sizes that the caller does not give. Errors must name arguments that
// are missing or that contradict each other.

DistributedTensor from_part(const at::Tensor& whole, const DeviceMesh& mesh,
                            const Placements& placements) {
  const at::Tensor part = distribute_tensor(whole, mesh, placements).to_local();
  return DistributedTensor::from_local(part, mesh, placements);
}

TEST(FromLocal, ComputesTheGlobalSizeOfUnevenShards) {
  for (const int ranks : {1, 2, 3, 4}) {
    RunOnMesh({ranks}, {"x"}, [](const DeviceMesh& mesh) {
      for (const std::int64_t rows : {0, 1, 2, 5, 6}) {
        const at::Tensor whole = values({rows, 3});
        EXPECT_EQUAL(from_part(whole, mesh, {Shard{0}}), whole);
        EXPECT_EQUAL(from_part(whole.t(), mesh, {Shard{-1}}), whole.t());
      }
    });
  }
}

TEST(FromLocal, RefusesWrongChunkSizesOnEveryRank) {
  const auto errors = testing::ErrorsOfRanks(3, [](Rank& rank) {
    DistributedTensor::from_local(at::zeros({rank.rank() == 1 ? 3 : 2}), rank.mesh({3}, {"x"}),
                                  {Shard{0}});
  });
  for (const std::string& error : errors) {
    EXPECT_CONTAINS(error, "from_local: to place plain tensors as [Shard(0)]",
                    "sizes [2, 3, 2] along dimension 0",
                    "torch.chunk splits size 7 into [3, 3, 1]");
  }
}

TEST_ON_MESH(FromLocal, NamesMissingAndInvalidArguments, {2}, {"x"}) {
  const at::Tensor three = at::zeros({3});
  const auto two = init_device_mesh(comm::fake_world(0, 2), {2}, {"x"});
  EXPECT_ERROR(DistributedTensor::from_local(three, two, {Shard{0}}, {{7}}), "a tensor of [7]");
  EXPECT_ERROR(DistributedTensor::from_local(three, two, {Shard{1}}), "Shard(1)", "1 dimensions");
  EXPECT_ERROR(DistributedTensor::from_local(three, two, {}), "0 placements were passed");
  const Placements rows{Shard{0}};
  const std::vector<std::int64_t> sizes{4};
  EXPECT_ERROR(DistributedTensor::from_local({}, mesh, rows), "the tensor is undefined");
  EXPECT_ERROR(DistributedTensor::from_local({}, mesh, rows, sizes), "the tensor is undefined");
  EXPECT_ERROR(DistributedTensor::from_local(values({2}), ShardingSpec{mesh, nullptr}, sizes),
               "from_local: the spec has no layout");
  EXPECT_ERROR(distribute_tensor({}, mesh, rows), "distribute_tensor: the tensor is undefined");
  EXPECT_ERROR(distribute_tensor({}, mesh, rows, 0), "distribute_tensor: the tensor is undefined");
  const DistributedTensor made = distribute_tensor(values({4}), mesh, rows);
  EXPECT_ERROR(distribute_tensor(made, mesh, rows, 0), "is distributed already");
  EXPECT_ERROR(made.redistribute(LayoutPtr()), "redistribute: the layout is null");
  EXPECT_ERROR(check_agreement(DistributedTensor()), "but the tensor is undefined");
  EXPECT_ERROR(zeros({-4, 2}, mesh, rows), "the sizes [-4, 2]");
}

TEST_ON_MESH(LocalMap, NamesMissingAndInvalidArguments, {2}, {"x"}) {
  using Tensors = std::vector<at::Tensor>;
  const Placements whole{Replicate{}};
  const Tensors two{values({4}), values({4})};
  const auto same = [](const Tensors& tensors) { return tensors; };
  const auto none = [](const Tensors&) { return Tensors(2); };
  EXPECT_ERROR(local_map({}, two, mesh, {whole, whole}), "local_map: the function is empty");
  EXPECT_ERROR(local_map(none, two, mesh, {whole, whole}), "result 0 of the function");
  EXPECT_ERROR(local_map(same, two, mesh, {whole, whole}, {.in_placements = {whole}}),
               "in_placements has 1 items for 2 arguments");
  EXPECT_ERROR(local_map(same, two, mesh, {whole, whole}, {.in_grad_placements = {whole}}),
               "in_grad_placements has 1 items for 2 arguments");
  EXPECT_ERROR(local_map(same, two, mesh, {whole, whole}, {.out_sizes = {{4}}}),
               "out_sizes has 1 items for 2 lists of out_placements");
  const at::Tensor rows = distribute_tensor(values({4, 4}), mesh, {Shard{0}});
  EXPECT_ERROR(local_map(same, {rows}, mesh, {whole}, {.in_placements = {Placements{Shard{1}}}}),
               "argument 0 must have placements");
}

// Tests the argument `grad_placements` of full_tensor(), to_local() and from_local().

TEST_ON_MESH(GradientPlacements, OfFullTensorCanBePartial, {3}, {"x"}) {
  const auto leaf = distribute_tensor(values({4, 2}), mesh, {Shard{0}}).tensor().detach();
  leaf.requires_grad_();
  const auto whole = DistributedTensor(leaf).full_tensor(Placements{Partial{}});
  whole.mul(rank.rank() + 1).sum().backward();
  const DistributedTensor gradient(leaf.grad());
  EXPECT_EQ(gradient.placements(), Placements{Shard{0}});
  EXPECT_EQUAL(gradient, at::full({4, 2}, 6.0, at::kDouble));
}

TEST(GradientPlacements, MustMatchTheShardsOfTheTensor) {
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    const DistributedTensor columns =
        distribute_tensor(values({4, 4}), rank.mesh({2}, {"x"}), {Shard{1}});
    columns.to_local(Placements{Shard{0}});
  });
  EXPECT_CONTAINS(errors,
                  "to_local: the local gradient of a tensor of sizes [4, 4] placed as [Shard(1)] "
                  "cannot be placed as [Shard(0)]; pass placements that split the gradient");
  RunOnMesh({2, 2}, {"a", "b"}, [](const DeviceMesh& mesh) {
    const DistributedTensor whole =
        distribute_tensor(values({5, 4}), mesh, {Replicate{}, Replicate{}});
    EXPECT_ERROR(whole.full_tensor(Placements{Shard{0}, Replicate{}}), "full_tensor: ", "[5, 4]");
    EXPECT_ERROR(DistributedTensor::from_local(values({5, 4}), mesh, {Replicate{}, Replicate{}}, {},
                                               Placements{Replicate{}, Shard{1}}),
                 "from_local: the local gradient", "[5, 4]", "[Replicate(), Shard(1)]");
    const DistributedTensor rows = distribute_tensor(values({5, 4}), mesh, {Shard{0}, Replicate{}});
    EXPECT_ERROR(rows.to_local(Placements{Replicate{}, Shard{0}}), "to_local: the local gradient");
  });
}

// The following tests check the gradients of replicated arguments of local_map().

using Tensors = std::vector<at::Tensor>;

Tensors multiplied(const Tensors& t) {
  return {at::mm(t[0], t[1])};
}

struct Product {
  explicit Product(const DeviceMesh& on, const Placements& of_x = {Shard{0}})
      : mesh(on),
        x(distribute_tensor(values({7, 3}), mesh, of_x)),
        weight(distribute_tensor(values({3, 2}, 1), mesh, Placements(of_x.size(), Replicate{}))
                   .tensor()
                   .detach()) {
    weight.requires_grad_();
  }
  DeviceMesh mesh;
  at::Tensor x, weight;
};

at::Tensor gradient_alone() {
  const at::Tensor weight = values({3, 2}, 1).requires_grad_();
  at::mm(values({7, 3}), weight).sum().backward();
  return weight.grad();
}

TEST_ON_RANKS(LocalMapGradients, OfReplicatedArgumentsFollowTheResultPlacements, 4) {
  using Function = std::function<Tensors(const Tensors&)>;
  const auto summed = [](const Tensors& t) { return Tensors{at::mm(t[0], t[1]).sum()}; };
  const DeviceMesh line = rank.mesh({4}, {"x"}), square = rank.mesh({2, 2}, {"a", "b"});
  struct Row {
    DeviceMesh mesh;
    Placements x, result;
    bool sums = false;
  };
  for (const Row& row :
       {Row{line, {Shard{0}}, {Shard{0}}}, Row{line, {Shard{0}}, {Partial{}}, true},
        Row{line, {Replicate{}}, {Replicate{}}},
        Row{square, {Replicate{}, Shard{0}}, {Replicate{}, Shard{0}}}}) {
    const Product p(row.mesh, row.x);
    const LocalMapOptions options{
        .out_sizes = {row.sums ? std::vector<std::int64_t>{} : std::vector<std::int64_t>{7, 2}}};
    const auto results = local_map(row.sums ? Function(summed) : Function(multiplied),
                                   {p.x, p.weight}, row.mesh, {row.result});
    results[0].sum().backward();
    EXPECT_CLOSE(p.weight.grad(), gradient_alone()) << to_string(row.x) << to_string(row.result);
  }
}

TEST_ON_RANKS(LocalMapGradients, ArePlainAndFullForPlainArguments, 4) {
  const Product p(rank.mesh({4}, {"x"}));
  const auto product = [&](const at::Tensor& weight, LocalMapOptions options) {
    options.out_sizes = {{7, 2}};
    return local_map(multiplied, {p.x, weight}, p.mesh, {{Shard{0}}}, options)[0];
  };
  const at::Tensor plain = DistributedTensor(p.weight).full_tensor().detach().requires_grad_();
  product(plain, {}).sum().backward();
  EXPECT_FALSE(tessera::is_distributed(plain.grad()));
  EXPECT_TRUE(at::allclose(plain.grad(), gradient_alone()));
  // With Replicate in in_grad_placements, local_map() does not reduce the gradient.
  plain.mutable_grad().reset();
  product(plain, {.in_grad_placements = {std::nullopt, Placements{Replicate{}}}}).sum().backward();
  EXPECT_FALSE(at::allclose(plain.grad(), gradient_alone()));
  // The gradient of to_local()'s result must reach the distributed tensor.
  product(DistributedTensor(p.weight).to_local(), {}).sum().backward();
  EXPECT_CLOSE(p.weight.grad(), gradient_alone());
}

TEST_ON_RANKS(LocalMapGradients, NeedPlacementsIfResultsDiffer, 4) {
  const Product p(rank.mesh({4}, {"x"}));
  const auto both = [&](const LocalMapOptions& options) {
    return local_map([](const Tensors& t) { return Tensors{at::mm(t[0], t[1]), t[1].square()}; },
                     {p.x, p.weight}, p.mesh, {{Shard{0}}, {Replicate{}}}, options);
  };
  EXPECT_ERROR(both({.out_sizes = {{7, 2}, {3, 2}}}),
               "the gradient of argument 1, which is replicated",
               "results are placed as [Shard(0)], [Replicate()]", "in_grad_placements");
  EXPECT_EQ(both({.in_grad_placements = {std::nullopt, Placements{Partial{}}},
                  .out_sizes = {{7, 2}, {3, 2}}})
                .size(),
            2);
  const c10::NoGradGuard none;
  EXPECT_EQ(both({.out_sizes = {{7, 2}, {3, 2}}}).size(), 2);
}

// The local function contains an all-reduce, which out_placements cannot express.
TEST(LocalMapGradients, AreComparedInDebugMode) {
  const testing::DebugChecks checks("1");
  const auto errors = testing::ErrorsOfRanks(4, [](Rank& rank) {
    const Product p(rank.mesh({4}, {"x"}));
    local_map(
        [&](const Tensors& t) {
          const at::Tensor term = at::mm(t[0], t[1]).sum();
          const at::Tensor others = term.detach().clone();
          p.mesh.group().all_reduce(others, ReduceOp::kSum)->wait();
          return Tensors{term + (others - term.detach())};
        },
        {p.x, p.weight}, p.mesh, {{Replicate{}}})[0]
        .backward();
  });
  EXPECT_CONTAINS(errors, "to_local: the local gradient of a tensor [3, 2]", "in_grad_placements");
}

TEST(FromLocal, ComparesReplicatedValuesInDebugMode) {
  const testing::DebugChecks checks("1");
  const auto errors = testing::ErrorsOfRanks(4, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({2, 2}, {"a", "b"});
    DistributedTensor::from_local(values({3}, rank.rank() / 2), mesh, {Shard{0}, Replicate{}});
    DistributedTensor::from_local(values({3}, rank.rank()), mesh, {Shard{0}, Replicate{}});
  });
  EXPECT_CONTAINS(errors[0], "from_local: the local tensor differs from rank 0 on ranks 1");
  EXPECT_CONTAINS(errors[3], "from_local: the local tensor differs from rank 2 on ranks 3");
}

TEST(DistributeTensor, ComparesValuesInDebugMode) {
  const testing::DebugChecks checks("1");
  const auto errors = testing::ErrorsOfRanks(2, [](Rank& rank) {
    distribute_tensor(values({4}, rank.rank()), rank.mesh({2}, {"x"}), {Shard{0}});
  });
  EXPECT_CONTAINS(errors[0], "distribute_tensor: the tensor differs from rank 0 on ranks 1",
                  "first at [0]: 0 on rank 0", "source");
}

}  // namespace
}  // namespace tessera
