// Operators on the meta device, as a plan is recorded with: their results have the sizes of real
// ones, and so have the gradients.

#include "tessera/comm/meta_world.h"
#include "testing/distributed.h"

namespace tessera {
namespace {
namespace meta_sizes {

using Sizes = std::vector<std::int64_t>;
using Tensors = std::vector<at::Tensor>;

struct Function {
  const char* name;
  std::vector<Sizes> inputs;
  std::function<at::Tensor(const Tensors&)> compute;
};

const std::vector<Function>& functions() {
  static const std::vector<Function> all{
      {"conv1d",
       {{5, 4, 6}, {6, 2, 3}, {6}},
       [](auto& t) { return at::conv1d(t[0], t[1], t[2], 1, 1, 1, 2); }},
      {"conv2d",
       {{3, 2, 7, 6}, {4, 2, 3, 2}, {4}},
       [](auto& t) { return at::conv2d(t[0], t[1], t[2], 2, 1); }},
      {"dilated",
       {{3, 2, 9, 8}, {4, 2, 3, 2}},
       [](auto& t) { return at::conv2d(t[0], t[1], {}, 1, 2, {2, 3}); }},
      {"same",
       {{3, 2, 9, 8}, {4, 2, 3, 3}},
       [](auto& t) { return at::conv2d(t[0], t[1], {}, 1, "same"); }},
      {"one_sample", {{2, 7, 6}, {4, 2, 3, 2}}, [](auto& t) { return at::conv2d(t[0], t[1]); }},
      {"conv3d",
       {{2, 3, 5, 4, 6}, {4, 3, 2, 2, 2}, {4}},
       [](auto& t) { return at::conv3d(t[0], t[1], t[2]); }},
      {"transposed",
       {{2, 4, 5, 4}, {4, 2, 3, 3}, {4}},
       [](auto& t) { return at::conv_transpose2d(t[0], t[1], t[2], 2, 1, 1, 2); }},
      {"no_rows",
       {{0, 2, 7, 6}, {4, 2, 3, 2}, {4}},
       [](auto& t) { return at::conv2d(t[0], t[1], t[2]); }},
      {"batch_norm",
       {{3, 2, 7, 6}, {2}, {2}},
       [](auto& t) { return at::batch_norm(t[0], t[1], t[2], {}, {}, true, 0.1, 1e-5, false); }},
      {"group_norm", {{3, 4, 7, 6}, {4}}, [](auto& t) { return at::group_norm(t[0], 2, t[1]); }},
      {"layer_norm",
       {{3, 4, 6}, {6}, {6}},
       [](auto& t) { return at::layer_norm(t[0], {6}, t[1], t[2]); }},
      {"max_pool", {{3, 4, 6, 6}}, [](auto& t) { return at::max_pool2d(t[0], 2); }},
      {"avg_pool", {{3, 4, 6, 6}}, [](auto& t) { return at::avg_pool2d(t[0], 2); }},
      {"upsample", {{3, 4, 6, 6}}, [](auto& t) { return at::upsample_nearest2d(t[0], {12, 12}); }},
      {"adaptive_pool",
       {{3, 4, 6, 6}},
       [](auto& t) { return at::adaptive_avg_pool2d(t[0], {2, 3}); }},
      {"relu", {{3, 4}}, [](auto& t) { return at::relu(t[0]); }},
      {"hardswish", {{3, 4}}, [](auto& t) { return at::hardswish(t[0]); }},
      {"hardtanh", {{3, 4}}, [](auto& t) { return at::hardtanh(t[0]); }},
      {"roll", {{3, 4}}, [](auto& t) { return at::roll(t[0], 1, 0); }},
      {"where", {{3, 4}}, [](auto& t) { return at::where(t[0] > 0, t[0], t[0].sin()); }},
      {"mse_loss", {{3, 4}, {3, 4}}, [](auto& t) { return at::mse_loss(t[0], t[1]); }},
      {"cumsum", {{3, 4}}, [](auto& t) { return t[0].cumsum(1); }},
  };
  return all;
}

/// The sizes of the result and of the gradients of all inputs.
template <class Make>
std::vector<Sizes> sizes_of(const Function& function, Make make) {
  Tensors inputs;
  for (const Sizes& sizes : function.inputs) {
    inputs.push_back(make(sizes).requires_grad_());
  }
  const at::Tensor result = function.compute(inputs);
  std::vector<Sizes> found{result.sizes().vec()};
  result.sum().backward();
  for (const at::Tensor& input : inputs) {
    found.push_back(input.grad().sizes().vec());
  }
  return found;
}

TEST(MetaTensors, HaveTheSizesOfRealOnes) {
  for (const Function& each : functions()) {
    const auto real = sizes_of(each, [](auto& sizes) { return at::ones(sizes); });
    EXPECT_EQ(sizes_of(each, [](auto& sizes) { return at::ones(sizes, at::kMeta); }), real)
        << each.name;
    for (const Placement placement : {Placement(Replicate{}), Placement(Shard{0})}) {
      const ReplicationScope all_ranks_have_the_same_ids;
      const DeviceMesh mesh = init_device_mesh(comm::meta_world(1, 2), {2}, {"tp"});
      EXPECT_EQ(sizes_of(each,
                         [&](auto& sizes) {
                           return distribute_tensor(at::ones(sizes, at::kMeta), mesh, {placement})
                               .tensor()
                               .detach();
                         }),
                real)
          << each.name << to_string(placement);
    }
  }
}

}  // namespace meta_sizes
}  // namespace
}  // namespace tessera
