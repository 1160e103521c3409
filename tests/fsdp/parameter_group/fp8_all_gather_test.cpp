// Weights that are gathered in eight bits: what comes, what is sent, and a training on several
// ranks that is one rank's, bit for bit.

#include "tessera/fsdp/fp8_all_gather.h"

#include "fsdp/training/training.h"
#include "tessera/kernels/fp8.h"
#include "tessera/nn/fp8.h"

namespace tessera::fsdp {
namespace {

constexpr testing::Sizes kSizes{.dim = 16, .hidden = 48, .classes = 3};

Options options_of(const nn::ModuleBase& model, c10::ScalarType type) {
  Options options{.mp_policy = {.param_dtype = type, .reduce_dtype = at::kFloat},
                  .reshard_after_forward = true};
  options.all_gather_extension = fp8_all_gather(model, type);
  return options;
}

/// After `steps` of gradient descent, in which every rank has the same rows.
testing::Training trained(const DeviceMesh& mesh, c10::ScalarType type, int steps) {
  testing::Filled<testing::SmallModel> model(kSizes.dim, kSizes.hidden, kSizes.classes);
  nn::convert_to_fp8(model, {.exclude = {"head"}});
  testing::shard(model, mesh, options_of(model, type));
  testing::Training training;
  for (int step = 0; step < steps; ++step) {
    const at::Tensor loss = testing::loss_of(model, testing::batch(kSizes.dim, step), 0, 12);
    loss.backward();
    training.losses.push_back(loss.item<double>());
    testing::descend(model, 0.1);
  }
  for (const auto& [name, slot] : model.named_slots()) {
    training.parameters.push_back(testing::full_tensor(slot->persistent()).detach());
  }
  return training;
}

TEST(Fp8AllGather, TrainsAsOneRankBitForBit) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    testing::Training expected;
    RunRanks(1, [&](Rank& rank) { expected = trained(rank.mesh({1}, {"dp"}), type, 5); });
    EXPECT_LT(expected.losses.back(), expected.losses.front());
    // 48 and 16 rows divide by 2 and 4. The mean of 2 or 4 equal gradients is exact.
    for (const int ranks : {2, 4}) {
      RunRanks(ranks, [&](Rank& rank) {
        const testing::Training found = trained(rank.mesh({ranks}, {"dp"}), type, 5);
        EXPECT_EQ(found.losses, expected.losses);
        for (std::size_t i = 0; i < expected.parameters.size(); ++i) {
          EXPECT_TRUE(found.parameters[i].equal(expected.parameters[i])) << i;
        }
      });
    }
  }
}

TEST(Fp8AllGather, BringsTheQuantisedWeightAlsoOfUnevenShards) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    RunRanks(3, [&](Rank& rank) {
      testing::Filled<nn::Linear> linear(16, 16);
      nn::convert_to_fp8(linear);
      const at::Tensor weight = linear.weight->detach().to(type);
      const at::Tensor bias = linear.bias->detach().to(type);
      fully_shard(linear, rank.mesh({3}, {"dp"}), options_of(linear, type));
      const UnshardScope scope(linear);
      EXPECT_TRUE(
          linear.weight->equal(kernels::dequantize_fp8(kernels::quantize_fp8(weight), type)));
      EXPECT_TRUE(linear.bias->equal(bias));  // as a value
    });
  }
}

// 16 x 64 bytes and 16 scales of 4 bytes, padded to 64 on each rank, where bf16 are 2048 bytes.
TEST(Fp8AllGather, SendsAByteAnElementAndAScaleARow) {
  RunRanks(4, [](Rank& rank) {
    testing::Filled<nn::Linear> linear(64, 16, nn::LinearOptions{.bias = false});
    nn::convert_to_fp8(linear);
    fully_shard(linear, rank.mesh({4}, {"dp"}), options_of(linear, at::kBFloat16));
    const comm::TrafficTable before = rank.world()->traffic().table();
    linear(testing::uniform_values({2, 64}, 1)).sum().backward();
    const comm::Traffic gathers =
        testing::traffic_of(rank.world()->traffic().since(before), "dp", "all_gather");
    EXPECT_EQ(gathers.calls, 2);
    EXPECT_EQ(gathers.bytes, 2 * (4 * 64 + 64));
  });
}

TEST(Fp8AllGather, LeavesWhatIsNotConverted) {
  testing::Filled<testing::SmallModel> model(kSizes.dim, kSizes.hidden, kSizes.classes);
  const auto extension_of = [&](const std::string& name) {
    return fp8_all_gather(model, at::kFloat)(name, model.named_slots().front().second->get());
  };
  EXPECT_FALSE(extension_of("weight").has_value());
  EXPECT_ERROR(fp8_all_gather(model, at::kHalf), "of type Half");
}

}  // namespace
}  // namespace tessera::fsdp
