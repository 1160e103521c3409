// The examples in the comments of register_rule.h and local_map.h, as they stand there.

#include <torch/library.h>

#include "tessera/core/register_rule.h"
#include "tessera/dtensor/communication_scope.h"
#include "tessera/dtensor/local_map.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

at::Tensor scale(const at::Tensor& x, double factor) {
  return x * factor;
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  return at::mm(a, b);
}

TORCH_LIBRARY(mylib, library) {
  library.def("scale(Tensor x, float factor) -> Tensor");
  library.def("product(Tensor a, Tensor b) -> Tensor");
  library.impl("scale", torch::dispatch(c10::DispatchKey::CPU, &scale));
  library.impl("product", torch::dispatch(c10::DispatchKey::CPU, &product));
}

const bool kRegistered = [] {
  register_rule("mylib::scale", [](const OpCall& call) -> std::optional<ShardingRule> {
    ShardingRule rule;
    ShardingRule::TensorFactors dims;
    for (const std::int64_t size : call.tensor(0).sizes) {
      dims.push_back({static_cast<int>(rule.factors.size())});
      rule.factors.push_back({.size = size});
    }
    rule.inputs = {dims};
    rule.outputs = {dims};
    rule.linear = {{.partial_inputs = {0}, .op = ReduceOp::kSum}};
    return rule;
  });
  register_rule(
      "mylib::product",
      std::vector<AcceptedPlacements>{{.inputs = {Shard{0}, Replicate{}}, .outputs = {Shard{0}}},
                                      {.inputs = {Replicate{}, Shard{1}}, .outputs = {Shard{1}}},
                                      {.inputs = {Shard{1}, Shard{0}}, .outputs = {Partial{}}}},
      [](const OpCall& call) {
        return std::vector<std::vector<std::int64_t>>{
            {call.tensor(0).size(0), call.tensor(1).size(1)}};
      });
  return true;
}();

at::Tensor call_scale(const at::Tensor& x, double factor) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("mylib::scale", "")
      .typed<at::Tensor(const at::Tensor&, double)>()
      .call(x, factor);
}

at::Tensor call_product(const at::Tensor& a, const at::Tensor& b) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("mylib::product", "")
      .typed<at::Tensor(const at::Tensor&, const at::Tensor&)>()
      .call(a, b);
}

TEST(ExtensionExamples, ARuleOfFactorsKeepsShardsAndPartials) {
  ASSERT_TRUE(kRegistered);
  const auto values = at::arange(21, at::kDouble).view({7, 3});
  RunOnMesh({2}, {"x"}, [&](const DeviceMesh& mesh) {
    const StrictScope strict;
    for (const Placement& placement :
         {Placement(Shard{0}), Placement(Shard{1}), Placement(Partial{})}) {
      const auto x = distribute_tensor(values, mesh, {placement});
      const CommunicationScope communication(mesh);
      const DistributedTensor scaled(call_scale(x, 2.5));
      EXPECT_EQ(communication.total().calls, 0);
      EXPECT_EQ(scaled.placements(), Placements{placement});
      EXPECT_TRUE(at::allclose(scaled.full_tensor(), values * 2.5));
    }
  });
}

TEST(ExtensionExamples, AcceptedPlacementsGiveTheirResults) {
  const auto a = at::arange(12, at::kDouble).view({4, 3}), b = a.t().contiguous().cos();
  RunOnMesh({2}, {"x"}, [&](const DeviceMesh& mesh) {
    const StrictScope strict;
    struct Row {
      Placement a, b, result;
    };
    for (const Row& row :
         {Row{Shard{0}, Replicate{}, Shard{0}}, Row{Replicate{}, Shard{1}, Shard{1}},
          Row{Shard{1}, Shard{0}, Partial{}}}) {
      const DistributedTensor result(
          call_product(distribute_tensor(a, mesh, {row.a}), distribute_tensor(b, mesh, {row.b})));
      EXPECT_EQ(result.placements(), Placements{row.result});
      EXPECT_TRUE(at::allclose(result.full_tensor(), at::mm(a, b)));
    }
  });
}

TEST(ExtensionExamples, LocalMapRunsOnShardsForwardAndBackward) {
  const auto values = at::arange(24, at::kDouble).view({8, 3});
  RunOnMesh({4}, {"x"}, [&](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(values, mesh, {Shard{0}}).tensor().detach();
    x.requires_grad_();
    const auto sum_of_squares = [](const std::vector<at::Tensor>& locals) {
      return std::vector{locals[0].square().sum()};
    };
    at::Tensor loss = local_map(sum_of_squares, {x}, mesh, {{Partial{}}}).front();
    loss.backward();
    EXPECT_TRUE(at::allclose(DistributedTensor(loss).full_tensor(), values.square().sum()));
    EXPECT_TRUE(at::allclose(DistributedTensor(x.grad()).full_tensor(), 2 * values));
  });
}

}  // namespace
}  // namespace tessera
