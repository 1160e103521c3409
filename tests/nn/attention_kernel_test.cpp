#include "tessera/nn/attention_kernel.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "testing/errors.h"

namespace tessera::nn {
namespace {

using at::SDPBackend;

at::Tensor on_meta(std::int64_t heads) {
  return at::empty({2, heads, 5, 8}, at::device(at::kMeta));
}

/// As libtorch answers in fp32 on a GPU: a kernel for equal head counts alone.
SDPBackend equal_heads_only(const at::Tensor& q, const at::Tensor& k, const at::Tensor&) {
  return q.sizes() == k.sizes() ? SDPBackend::efficient_attention : SDPBackend::math;
}

TEST(ChooseAttention, RepeatsHeadsWhereThatLetsAKernelRun) {
  const AttentionKernel kernel =
      choose_attention(on_meta(4), on_meta(2), on_meta(2), equal_heads_only);
  EXPECT_TRUE(kernel.repeats_heads);
  EXPECT_EQ(to_string(kernel), "efficient, key-value heads repeated");
}

TEST(ChooseAttention, RepeatsNoHeadsForAKernelThatTakesThem) {
  const auto flash = [](const at::Tensor&, const at::Tensor&, const at::Tensor&) {
    return SDPBackend::flash_attention;
  };
  EXPECT_EQ(to_string(choose_attention(on_meta(4), on_meta(2), on_meta(2), flash)), "flash");
}

TEST(ChooseAttention, RepeatsNoHeadsInVain) {
  const auto math = [](const at::Tensor&, const at::Tensor&, const at::Tensor&) {
    return SDPBackend::math;
  };
  EXPECT_EQ(to_string(choose_attention(on_meta(4), on_meta(2), on_meta(2), math)), "math");
  EXPECT_FALSE(choose_attention(on_meta(4), on_meta(4), on_meta(4), math).repeats_heads);
}

TEST(ChooseAttention, LeavesTheCpuToLibtorch) {
  const at::Tensor q = at::ones({2, 4, 5, 8}), kv = at::ones({2, 2, 5, 8});
  EXPECT_FALSE(choose_attention(q, kv, kv, equal_heads_only).repeats_heads);
  EXPECT_EQ(to_string(attention_kernel(at::dtype(at::kFloat), 4, 4, 16, 8)), "flash");
}

TEST(MathAttention, IsRefusedUnlessItIsAllowed) {
  const at::Tensor q = on_meta(4), k = on_meta(2);
  tessera::detail::check_fused({SDPBackend::efficient_attention, true}, q, k, false);
  EXPECT_ERROR(tessera::detail::check_fused({SDPBackend::math}, q, k, true),
               "4 heads of 8 features over 5 tokens in Float with a mask on meta", "bf16",
               "nn::allow_math_attention()", "--allow-math-attention");
  allow_math_attention(true);
  EXPECT_NO_THROW(tessera::detail::check_fused({SDPBackend::math}, q, k, true));
  allow_math_attention(false);
}

}  // namespace
}  // namespace tessera::nn
