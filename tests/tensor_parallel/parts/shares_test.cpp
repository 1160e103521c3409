// A plain tensor that a style takes for a part is this rank's share of what one rank computes:
// known operators tell, others are refused.

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <memory>
#include <ostream>

#include "tensor_parallel/parts/between_linears.h"
#include "tessera/nn/linear.h"
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

class NoShare : public ::testing::TestWithParam<PartCase> {};

TEST_P(NoShare, IsRefused) {
  RunRanks(2, [](Rank& rank) {
    BetweenLinears model(GetParam().between, GetParam().features);
    fill(model);
    parallelize_module(model, rank.mesh({2}, {"tp"}), plan_between());
    EXPECT_ERROR(model(four_tokens()), "'out_of' takes a plain tensor for a part, Shard(-1), but ",
                 GetParam().message, "have 'into' hand out a distributed tensor",
                 "from_local or local_map");
  });
}

/// (tokens, heads, 4) of a rank's features.
at::Tensor heads_of_share(const at::Tensor& x) {
  return x.view({4, -1, 4});
}

INSTANTIATE_TEST_SUITE_P(
    , NoShare,
    ::testing::Values(
        PartCase{"group_norm", [](const at::Tensor& x) { return at::group_norm(x, 1); },
                 "what native_group_norm makes of a part is not known"},
        PartCase{"convolution",
                 [](const at::Tensor& x) {
                   return at::conv1d(x.unsqueeze(1), at::ones({1, 1, 3}), {}, 1, 1).squeeze(1);
                 },
                 "what convolution makes of a part is not known"},
        PartCase{"fourier_transform", [](const at::Tensor& x) { return at::real(at::fft_fft(x)); },
                 "what fft_"},
        PartCase{"positions_by_index",
                 [](const at::Tensor& x) {
                   return x.index({at::indexing::Slice(), at::arange(x.size(1) - 1, -1, -1)});
                 },
                 "what index makes of a part"},
        PartCase{"product_with_a_vector",
                 [](const at::Tensor& x) { return x * x.mv(at::ones({x.size(1)})).unsqueeze(1); },
                 "what mv makes of a part"},
        PartCase{"triangle", [](const at::Tensor& x) { return x.tril(); }, "tril computed along"},
        PartCase{"padding",
                 [](const at::Tensor& x) {
                   return x - at::constant_pad_nd(x, {1, 0}).narrow(1, 0, x.size(1));
                 },
                 "constant_pad_nd computed along dimension 1"},
        PartCase{"norms_of_tokens", [](const at::Tensor& x) { return x.renorm(2, 0, 1.0); },
                 "renorm computed along dimension 1"},
        PartCase{"parts_side_by_side", [](const at::Tensor& x) { return at::cat({x, x * 2}, -1); },
                 "what is split is dimension 1 of [4, 24], or not in order there", 48},
        PartCase{"repeated", [](const at::Tensor& x) { return x.repeat({1, 2}); },
                 "what is split is dimension 1 of [4, 24]", 48},
        PartCase{"tokens_among_features",
                 [](const at::Tensor& x) { return x.t().reshape({4, x.size(1)}); },
                 "what is split is dimension "},
        PartCase{"heads_turned",
                 [](const at::Tensor& x) { return x.view({4, 4, -1}).transpose(1, 2).flatten(1); },
                 "what is split is dimension 1 of [4, 12], or not in order there"},
        PartCase{"one_head_for_all",
                 [](const at::Tensor& x) {
                   const at::Tensor heads = heads_of_share(x);
                   return (heads * heads.select(1, 0).unsqueeze(1)).flatten(1);
                 },
                 "one piece of what is split (a head) was taken for all"},
        PartCase{"one_feature_for_all",
                 [](const at::Tensor& x) { return x * x.select(1, 0).unsqueeze(1); },
                 "one piece of what is split"}),
    [](const auto& info) { return info.param.name; });

class AShare : public ::testing::TestWithParam<PartCase> {};

TEST_P(AShare, IsRight) {
  const auto make = [] {
    auto model = std::make_shared<BetweenLinears>(GetParam().between, GetParam().features);
    fill(*model);
    return model;
  };
  const auto alone = make();
  const at::Tensor expected = (*alone)(four_tokens());
  expected.square().sum().backward();
  for (const int ranks : {2, 3, 6}) {
    RunRanks(ranks, [&](Rank& rank) {
      const auto model = make();
      parallelize_module(*model, rank.mesh({ranks}, {"tp"}), plan_between());
      const at::Tensor out = (*model)(four_tokens());
      EXPECT_TRUE(out.allclose(expected, 1e-4, 1e-5));
      out.square().sum().backward();
      EXPECT_TRUE(full_tensor(model->into->slot("weight")->persistent().grad())
                      .allclose(alone->into->weight->grad(), 1e-4, 1e-5));
    });
  }
}

/// Every operator that works element by element, one after another.
at::Tensor pointwise(const at::Tensor& x) {
  at::Tensor y = x.abs().add(1).sqrt() + x.sin().mul(0.5) - x.cos().neg() + x.tanh();
  y = y + at::atan(x) + at::asinh(x) + at::sinh(x * 0.1) + at::expm1(x * 0.1) + at::log1p(x.abs());
  y = y + at::sign(x) + at::floor(x) + at::ceil(x) + at::round(x) + at::trunc(x) + at::frac(x);
  y = y + at::selu(x) + at::celu(x) + at::elu(x) + at::softshrink(x) + at::hardshrink(x);
  y = y + at::threshold(x, 0.1, 0.2) + at::hardtanh(x) + at::leaky_relu(x) + at::log_sigmoid(x);
  y = y + at::gelu(x) + at::silu(x) + at::mish(x) + at::softplus(x) + at::hardswish(x);
  y = y + at::exp2(x * 0.1) + at::log2(x.abs() + 1) + at::log10(x.abs() + 1) + at::erf(x);
  y = y + at::atan2(x, x.abs() + 1) + at::hypot(x, y) + at::logaddexp(x, y) + at::fmod(x, 0.3);
  y = y + at::addcmul(x, x, y) + at::addcdiv(x, x, y.abs() + 1) + at::lerp(x, y, 0.2);
  y = y + at::where(x > 0, x, y) + at::maximum(x, y) + at::fmin(x, y) + x.clamp(-0.1, 0.1);
  y = y + x.masked_fill(x > 0.2, 0.5) + at::nan_to_num(x) + at::prelu(x, at::full({1}, 0.2));
  return y + at::clone(x).copy_(x * 2) + x.to(at::kDouble).to(at::kFloat);
}

INSTANTIATE_TEST_SUITE_P(
    , AShare,
    ::testing::Values(
        PartCase{"pointwise", pointwise},
        PartCase{"selected_tokens",
                 [](const at::Tensor& x) {
                   const at::Tensor turned = at::tensor({3, 2, 1, 0}, at::kLong);
                   return x.index_select(0, turned) + x.flip({0}) + x.cumsum(0) + x.roll(1, 0) +
                          std::get<0>(x.sort(0)) + at::zeros_like(x).index_add(0, turned, x);
                 }},
        PartCase{"padded_tokens",
                 [](const at::Tensor& x) {
                   return x + at::constant_pad_nd(x, {0, 0, 1, 0}).narrow(0, 0, 4);
                 }},
        PartCase{"triangles_of_heads",
                 [](const at::Tensor& x) {
                   const at::Tensor heads = heads_of_share(x).transpose(0, 1);
                   return heads.matmul(heads.transpose(1, 2))
                       .tril()
                       .matmul(heads)
                       .transpose(0, 1)
                       .flatten(1);
                 }},
        PartCase{"products_with_constants",
                 [](const at::Tensor& x) {
                   const at::Tensor mix = at::arange(16, at::kFloat).view({4, 4}).cos();
                   const at::Tensor heads = heads_of_share(x).transpose(0, 1).matmul(mix);
                   return heads.transpose(0, 1).flatten(1) + mix.matmul(x);
                 }},
        PartCase{
            "complex_pairs",
            [](const at::Tensor& x) {
              const at::Tensor pairs = at::view_as_complex(x.view({4, -1, 2, 2}));
              return at::view_as_real(pairs * at::polar(at::ones({2}), at::ones({2}))).flatten(1);
            }},
        PartCase{"halves_put_together",
                 [](const at::Tensor& x) { return at::glu(at::cat({x, x.sin()}, -1), -1); }},
        PartCase{"constants_among_tokens",
                 [](const at::Tensor& x) {
                   return at::cat({at::zeros({1, x.size(1)}), x}, 0).narrow(0, 1, 4);
                 }},
        PartCase{"one_key_for_all",
                 [](const at::Tensor& x) {
                   const at::Tensor heads = heads_of_share(x);
                   return heads.unsqueeze(2).expand({4, heads.size(1), 3, 4}).sum(2).flatten(1);
                 }}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::tensor_parallel
