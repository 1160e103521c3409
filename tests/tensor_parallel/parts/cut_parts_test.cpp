// A rank's part of a tensor may be cut where all that meets is of one piece. Pieces that meet are
// others than one rank's, and refused.

#include <ATen/ops/cat.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/stack.h>
#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <vector>

#include "tensor_parallel/parts/between_linears.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/containers.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/norm.h"
#include "tessera/tensor_parallel/parallelize.h"
#include "testing/errors.h"
#include "testing/full_tensor.h"
#include "testing/module_values.h"
#include "testing/ranks.h"

namespace tessera::tensor_parallel {
namespace {

using testing::fill;
using testing::full_tensor;
using testing::uniform_values;

struct Cut {
  const char* name;
  std::int64_t features;
  OfPart between;
  const char* parts = "2";  ///< that the message knows of
};
std::ostream& operator<<(std::ostream& out, const Cut& cut) {
  return out << cut.name;
}

at::Tensor gated(const std::vector<at::Tensor>& halves) {
  return at::silu(halves.at(0)) * halves.at(1);
}

class PiecesThatMeet : public ::testing::TestWithParam<Cut> {};

TEST_P(PiecesThatMeet, AreRefused) {
  RunRanks(2, [](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({1, 2}, {"dp", "tp"});
    const Cut& cut = GetParam();
    nn::Sequential model(std::make_shared<BetweenLinears>(cut.between, cut.features));
    fill(model);
    parallelize_module(model, mesh["tp"],
                       {{"*.into", colwise_parallel()}, {"*.out_of", rowwise_parallel()}});
    fsdp::fully_shard(model, mesh["dp"]);
    EXPECT_ERROR(model(four_tokens()), "'0.out_of' takes a plain tensor for a part, Shard(-1)",
                 "pieces of one part were computed with each other", "was cut along dimension 1",
                 "add {\"*.into\", fused_colwise_parallel({.parts = ", cut.parts,
                 "use_local_output = false");
    EXPECT_ERROR(model(four_tokens()), "pieces of one part");  // again
  });
}

// A style between would hide the cut from what comes after.
TEST(PiecesThatMeetBehindAStyle, AreRefusedByTheStyle) {
  class NormedPieces : public nn::Module<NormedPieces> {
   public:
    NormedPieces() {
      into = register_module("into", std::make_shared<nn::Linear>(6, 24));
      norm = register_module("norm", std::make_shared<nn::RMSNorm>(3));
      out_of = register_module("out_of", std::make_shared<nn::Linear>(12, 6));
    }
    at::Tensor forward(const at::Tensor& x) {
      const auto parts = (*into)(x).view({4, 2, -1}).unbind(1);
      const at::Tensor heads = parts[0].view({4, parts[0].size(1) / 3, 3});
      return (*out_of)((*norm)(heads).flatten(1) * parts[1]);
    }
    std::shared_ptr<nn::Linear> into, out_of;
    std::shared_ptr<nn::RMSNorm> norm;
  };
  RunRanks(2, [](Rank& rank) {
    NormedPieces model;
    fill(model);
    parallelize_module(model, rank.mesh({2}, {"tp"}),
                       {{"into", colwise_parallel()},
                        {"norm", sequence_parallel({.sequence_dim = 1, .use_local_output = true})},
                        {"out_of", rowwise_parallel()}});
    EXPECT_ERROR(model(four_tokens()), "'norm' takes a plain tensor for a part, Shard(1)",
                 "one piece of what is split (a head) was taken for all",
                 "add {\"into\", fused_colwise_parallel({.parts = N})}");
  });
}

INSTANTIATE_TEST_SUITE_P(
    , PiecesThatMeet,
    ::testing::Values(
        Cut{"chunk", 12, [](const at::Tensor& x) { return gated(x.chunk(2, -1)); }},
        Cut{"split", 12, [](const at::Tensor& x) { return gated(x.split(x.size(1) / 2, 1)); }},
        Cut{"split_into_unequal", 12,
            [](const at::Tensor& x) {
              const std::int64_t q = x.size(1) / 2, kv = q / 2;
              const auto parts = x.split_with_sizes({q, kv, kv}, -1);
              return parts[0] * at::sigmoid(at::cat({parts[1], parts[2]}, 1));
            },
            "N"},
        Cut{"slices", 12,
            [](const at::Tensor& x) {
              const std::int64_t half = x.size(1) / 2;
              return gated({x.slice(1, 0, half), x.slice(1, half)});
            },
            "N"},
        Cut{"view_and_unbind", 12,
            [](const at::Tensor& x) { return gated(x.view({4, 2, x.size(1) / 2}).unbind(1)); }},
        Cut{"view_and_select", 12,
            [](const at::Tensor& x) {
              const at::Tensor parts = x.view({4, 2, x.size(1) / 2});
              return gated({parts.select(1, 0), parts.select(1, 1)});
            },
            "N"},
        Cut{"attention", 8,
            [](const at::Tensor& x) {
              const auto parts = at::silu(x).chunk(3, -1);
              const at::Tensor weights = parts[0].t().matmul(parts[1]).softmax(-1);
              return parts[2].matmul(weights);
            },
            "3"}),
    [](const auto& info) { return info.param.name; });

class PiecesByThemselves : public ::testing::TestWithParam<Cut> {};

TEST_P(PiecesByThemselves, AreOneRanks) {
  const auto make = [] {
    auto model = std::make_shared<BetweenLinears>(GetParam().between, GetParam().features);
    fill(*model);
    return model;
  };
  const auto alone = make();
  const at::Tensor expected = (*alone)(four_tokens());
  expected.square().sum().backward();
  RunRanks(2, [&](Rank& rank) {
    const auto model = make();
    parallelize_module(*model, rank.mesh({2}, {"tp"}),
                       {{"into", colwise_parallel()}, {"out_of", rowwise_parallel()}});
    const at::Tensor out = (*model)(four_tokens());
    EXPECT_TRUE(out.allclose(expected, 1e-4, 1e-5));
    out.square().sum().backward();
    EXPECT_TRUE(full_tensor(model->into->slot("weight")->persistent().grad())
                    .allclose(alone->into->weight->grad(), 1e-4, 1e-5));
  });
}

at::Tensor head_by_head(const at::Tensor& x) {
  std::vector<at::Tensor> heads;
  for (const at::Tensor& head : x.view({4, x.size(1) / 4, 4}).unbind(1)) {
    heads.push_back(head.t().matmul(head).softmax(-1).matmul(head.t()).t());
  }
  return at::stack(heads, 1).flatten(1);
}

INSTANTIATE_TEST_SUITE_P(
    , PiecesByThemselves,
    ::testing::Values(
        Cut{"head_by_head", 24, head_by_head},
        Cut{"put_together", 24,
            [](const at::Tensor& x) {
              const auto parts = at::silu(x).chunk(2, -1);
              const at::Tensor whole = at::cat({parts[0] * 2, parts[1] * 2}, -1);
              return whole * x;
            }},
        // The parts within each head, as the rows of an nn::FusedLinear with groups are.
        Cut{"within_heads", 12,
            [](const at::Tensor& x) {
              return gated(x.view({4, x.size(1) / 4, 4}).chunk(2, -1)).flatten(1);
            }},
        Cut{"every_second", 12,
            [](const at::Tensor& x) {
              return gated({x.slice(1, 0, x.size(1), 2), x.slice(1, 1, x.size(1), 2)});
            }},
        Cut{"tokens", 24,
            [](const at::Tensor& x) {
              const auto parts = x.chunk(2, 0);
              return at::cat({parts[0] * parts[1], parts[1]}, 0);
            }}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::tensor_parallel
