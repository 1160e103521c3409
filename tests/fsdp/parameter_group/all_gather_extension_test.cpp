// Parameters that are gathered as 8-bit numbers with a scale.

#include <cstdlib>

#include "fsdp/training/training.h"
#include "testing/environment.h"

namespace tessera::fsdp {
namespace {

EncodedShard quantise(const at::Tensor& shard) {
  const at::Tensor scale = shard.abs().max().div(127).clamp_min(1e-12);
  return {.tensors = {shard.div(scale).round().to(at::kChar), scale},
          .metadata = std::int64_t{shard.dim()}};
}

at::Tensor dequantise(const std::vector<at::Tensor>& tensors, const std::any& metadata) {
  std::vector<std::int64_t> sizes(1 + std::any_cast<std::int64_t>(metadata), 1);
  sizes[0] = tensors[1].numel();
  return tensors[0].to(at::kFloat).mul(tensors[1].view(sizes));
}

/// Weights in 8 bits, the rest as it is.
std::optional<AllGatherExtension> eight_bits(const std::string& name, const at::Tensor&) {
  if (!name.ends_with("weight")) {
    return std::nullopt;
  }
  return AllGatherExtension{quantise, dequantise};
}

/// What the ranks' shards of `tensor` come back as, put together.
at::Tensor rounded(const at::Tensor& tensor, std::int64_t ranks, std::int64_t dim) {
  std::vector<at::Tensor> parts = tensor.chunk(ranks, dim);
  for (at::Tensor& part : parts) {
    const at::Tensor scale = part.abs().max() / 127;
    part = (part / scale).round() * scale;
  }
  return at::cat(parts, dim);
}

std::int64_t aligned_bytes(std::int64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

struct Split {
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t dim;
};

class EightBitGather : public ::testing::TestWithParam<Split> {
 protected:
  static Options options() {
    Options options{.reshard_after_forward = true};
    options.all_gather_extension = eight_bits;
    options.shard_placement = [dim = GetParam().dim](const std::string& name, const at::Tensor&) {
      return std::optional<Placement>(Shard{name == "weight" ? dim : 0});
    };
    return options;
  }
};

TEST_P(EightBitGather, ComputesWithWhatCameAndReducesWhatIsExact) {
  const auto [rows, columns, dim] = GetParam();
  RunRanks(4, [&, r = rows, c = columns, d = dim](Rank& rank) {
    Filled<nn::Linear> linear(c, r);
    const at::Tensor weight = linear.weight->detach().clone();
    const at::Tensor bias = linear.bias->detach().clone();
    const at::Tensor expected = rounded(weight, 4, d);
    ASSERT_FALSE(expected.equal(weight));
    fully_shard(linear, rank.mesh({4}, {"dp"}), options());

    at::Tensor x = testing::uniform_values({2, c}, 10 + rank.rank()).requires_grad_();
    const at::Tensor out = linear(x);
    EXPECT_TRUE(out.allclose(x.detach().matmul(expected.t()).add(bias), 1e-5, 1e-6));
    out.sum().backward();
    EXPECT_TRUE(x.grad().allclose(at::ones({2, r}).matmul(expected), 1e-5, 1e-6));

    at::Tensor inputs = at::zeros({c});
    for (int i = 0; i < 4; ++i) {
      inputs += testing::uniform_values({2, c}, 10 + i).sum(0).div(4);
    }
    const at::Tensor& persistent = linear.slot("weight")->persistent();
    EXPECT_TRUE(full_tensor(persistent.grad()).allclose(inputs.expand({r, c}), 1e-5, 1e-6));
    EXPECT_TRUE(full_tensor(persistent).equal(weight));
  });
}

TEST_P(EightBitGather, SendsAByteAnElementAndAScale) {
  const auto [rows, columns, dim] = GetParam();
  const std::int64_t chunk = ((dim == 0 ? rows : columns) + 3) / 4 * (dim == 0 ? columns : rows);
  const std::int64_t bytes = aligned_bytes(chunk) + 64 + aligned_bytes(4 * ((rows + 3) / 4));
  RunRanks(4, [&, r = rows, c = columns](Rank& rank) {
    Filled<nn::Linear> linear(c, r);
    fully_shard(linear, rank.mesh({4}, {"dp"}), options());
    const comm::TrafficTable before = rank.world()->traffic().table();
    linear(testing::uniform_values({2, c}, 1)).sum().backward();
    const comm::Traffic gathers =
        traffic_of(rank.world()->traffic().since(before), "dp", "all_gather");
    EXPECT_EQ(gathers.calls, 2);
    EXPECT_EQ(gathers.bytes, 2 * bytes);
  });
}

// Even rows; uneven ones; ranks without any; columns, that divide and that don't.
INSTANTIATE_TEST_SUITE_P(Sizes, EightBitGather,
                         ::testing::Values(Split{8, 5, 0}, Split{6, 5, 0}, Split{3, 5, 0},
                                           Split{3, 8, 1}, Split{5, 6, 1}));

TEST(AllGatherExtension, FollowsTheOptimizerAndAnotherTypeOfComputation) {
  RunRanks(4, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 6, {.bias = false});
    const at::Tensor start = linear.weight->detach().clone();
    Options options{.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
    options.all_gather_extension = eight_bits;
    fully_shard(linear, rank.mesh({4}, {"dp"}), options);
    linear(at::ones({1, 3})).sum().backward();
    testing::descend(linear, 0.5);
    const UnshardScope scope(linear);
    EXPECT_TRUE(linear.weight->equal(rounded(start - 0.5, 4, 0).to(at::kBFloat16)));
  });
}

// Between forward and backward the post-forward mesh keeps what forward computed with.
TEST(AllGatherExtension, IsNotAskedAgainAmongNeighbours) {
  RunRanks(4, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 6, {.bias = false});
    const at::Tensor expected = rounded(linear.weight->detach(), 4, 0);
    int encoded = 0;
    Options options{.reshard_after_forward = true, .post_forward_mesh_size = 2};
    options.all_gather_extension = [&](const std::string&, const at::Tensor&) {
      return std::optional(AllGatherExtension{[&](const at::Tensor& shard) {
                                                ++encoded;
                                                return quantise(shard);
                                              },
                                              dequantise});
    };
    fully_shard(linear, rank.mesh({4}, {"dp"}), options);
    at::Tensor x = at::ones({1, 3}).requires_grad_();
    linear(x).sum().backward();
    EXPECT_EQ(encoded, 1);
    EXPECT_TRUE(x.grad().allclose(expected.sum(0, true), 1e-5, 1e-6));
  });
}

TEST(AllGatherExtension, GathersAsMuchWhereRanksDoNotCompareTheirCalls) {
  const testing::SharedMemory without_shared_memory(false);
  RunRanks(4, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 6);
    const at::Tensor expected = rounded(linear.weight->detach(), 4, 0);
    Options options;
    options.all_gather_extension = eight_bits;
    fully_shard(linear, rank.mesh({4}, {"dp"}), options);
    const comm::TrafficTable before = rank.world()->traffic().table();
    const UnshardScope scope(linear);
    EXPECT_TRUE(linear.weight->equal(expected));
    // 2 rows of 3 bytes, a scale and 2 numbers of the bias, each in 64.
    EXPECT_EQ(traffic_of(rank.world()->traffic().since(before), "dp", "all_gather").bytes, 192);
  });
}

TEST(AllGatherExtension, IsNotAskedOnOneRank) {
  RunRanks(1, [](Rank& rank) {
    Filled<nn::Linear> linear(3, 4);
    const at::Tensor weight = linear.weight->detach().clone();
    Options options;
    options.all_gather_extension = eight_bits;
    fully_shard(linear, rank.mesh({1}, {"dp"}), options);
    const UnshardScope scope(linear);
    EXPECT_TRUE(linear.weight->equal(weight));
  });
}

std::string error_of_extension(Rank& rank, const AllGatherExtension& extension) {
  Filled<nn::Linear> linear(3, 6);
  Options options;
  options.all_gather_extension = [&](const std::string& name, const at::Tensor&) {
    return name == "weight" ? std::optional(extension) : std::nullopt;
  };
  return testing::message_of([&] {
    fully_shard(linear, rank.mesh({4}, {"dp"}), options);
    unshard(linear);
  });
}

TEST(AllGatherExtension, NeedsBothFunctions) {
  RunRanks(4, [](Rank& rank) {
    std::string error = error_of_extension(rank, {.pre_all_gather = quantise});
    EXPECT_CONTAINS(error, "'weight' lacks post_all_gather");
    error = error_of_extension(rank, {.post_all_gather = dequantise});
    EXPECT_CONTAINS(error, "'weight' lacks pre_all_gather");
    EXPECT_TRUE(rank.world()->traffic().table().empty());
  });
}

TEST(AllGatherExtension, MustReturnTheShardsOfAllRanks) {
  RunRanks(4, [](Rank& rank) {
    const auto first = [](const std::vector<at::Tensor>& tensors, const std::any&) {
      return tensors[0].select(0, 0);
    };
    const std::string error = error_of_extension(rank, {quantise, first});
    EXPECT_CONTAINS(error, "returned sizes [2, 3]", "[4, 2, 3]");
  });
}

}  // namespace
}  // namespace tessera::fsdp
