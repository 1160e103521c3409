// Attention of chunks, by parts: each kernel's results are merged and differentiated alike. The
// kernels that only CUDA has run by their formulas (attention_kernels_test.cpp).

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>

#include "dtensor/fused/attention_of_parts.h"
#include "fused/attention_part.h"
#include "tessera/dtensor/detail/fused_operators.h"
#include "tessera/kernels/fake_mode.h"
#include "testing/distributed.h"

namespace tessera {
namespace {

using at::SDPBackend;
using testing::values;
using Tensors = std::vector<at::Tensor>;

constexpr double kHidden = -std::numeric_limits<double>::infinity();

/// By formula; `mask`: (queries, keys), terms of the scores.
at::Tensor attend(const Tensors& t, const at::Tensor& mask) {
  const std::int64_t group = t[0].size(1) / t[1].size(1);
  const at::Tensor scores = t[0].matmul(t[1].repeat_interleave(group, 1).transpose(2, 3)) /
                            std::sqrt(static_cast<double>(t[0].size(3)));
  return (scores + mask).softmax(-1).matmul(t[2].repeat_interleave(group, 1));
}

Tensors leaves(const Tensors& tensors) {
  Tensors all;
  for (const at::Tensor& tensor : tensors) {
    all.push_back(tensor.detach().requires_grad_());
  }
  return all;
}

/// 5 queries and 14 keys: 4 under a mask, 5 that all see, 5 of a causal square.
struct Parts {
  Tensors inputs{values({2, 6, 5, 8}), values({2, 3, 14, 8}, 1), values({2, 3, 14, 8}, 2)};
  at::Tensor edge = at::full({5, 4}, kHidden, at::kDouble).tril(-2);
  at::Tensor mask = at::cat(
      {edge, at::zeros({5, 5}, at::kDouble), at::full({5, 5}, kHidden, at::kDouble).triu(1)}, 1);
  std::vector<std::pair<std::int64_t, detail::SeenKeys>> blocks{
      {0, {false, edge}}, {4, {}}, {9, {true}}};

  Tensors of(std::int64_t first, const detail::SeenKeys& seen) const {
    const std::int64_t count = seen.mask.defined() ? 4 : 5;
    return {inputs[0], inputs[1].narrow(2, first, count), inputs[2].narrow(2, first, count)};
  }
};

TEST(AttentionPart, IsMergedToTheWholeByEveryKernel) {
  const Parts parts;
  const Tensors mine = leaves(parts.inputs);
  // The last query would see nothing of the edge but for one key.
  ASSERT_TRUE(parts.mask.slice(1, 0, 4).isfinite().any(1).all().item<bool>());
  const at::Tensor expected = attend(mine, parts.mask);
  const at::Tensor grad = values(expected.sizes(), 3);
  expected.backward(grad);
  for (const SDPBackend backend : {SDPBackend::flash_attention, SDPBackend::efficient_attention,
                                   SDPBackend::cudnn_attention, SDPBackend::math}) {
    const detail::AttentionKernel kernel{backend, backend != SDPBackend::flash_attention};
    detail::AttentionPart merged;
    for (const auto& [first, seen] : parts.blocks) {
      const Tensors t = parts.of(first, seen);
      detail::AttentionPart part = detail::attention_part(kernel, t[0], t[1], t[2], seen);
      EXPECT_EQ(part.log_sum_exp.sizes(), expected.sizes().slice(0, 3));
      if (merged.out.defined()) {
        detail::merge(merged, part);
      } else {
        merged = part;
      }
    }
    EXPECT_TRUE(merged.out.allclose(expected, 1e-10, 1e-12)) << static_cast<int>(backend);
    at::Tensor of_q = at::zeros_like(mine[0]);
    Tensors of_k, of_v;
    for (const auto& [first, seen] : parts.blocks) {
      const Tensors t = parts.of(first, seen);
      const auto [q, k, v] =
          detail::attention_part_backward(kernel, grad, t[0], t[1], t[2], merged, seen);
      of_q += q;
      of_k.push_back(k);
      of_v.push_back(v);
    }
    EXPECT_TRUE(of_q.allclose(mine[0].grad(), 1e-10, 1e-12)) << static_cast<int>(backend);
    EXPECT_TRUE(at::cat(of_k, 2).allclose(mine[1].grad(), 1e-10, 1e-12));
    EXPECT_TRUE(at::cat(of_v, 2).allclose(mine[2].grad(), 1e-10, 1e-12));
  }
}

/// Half types are summed in fp32, also where no kernel takes them.
TEST(AttentionPart, ByFormulaIsRoundedOnce) {
  const at::Tensor q = values({1, 2, 5, 8}).to(at::kBFloat16);
  const detail::AttentionPart part =
      detail::attention_part({SDPBackend::math, false}, q, q, q, {.causal = true});
  EXPECT_EQ(part.out.scalar_type(), at::kBFloat16);
  EXPECT_EQ(part.log_sum_exp.scalar_type(), at::kFloat);
  const at::Tensor exact = q.to(at::kDouble);
  const at::Tensor mask = at::full({5, 5}, kHidden, at::kDouble).triu(1);
  EXPECT_TRUE(part.out.to(at::kDouble).allclose(attend({exact, exact, exact}, mask), 4e-3, 1e-6));
}

using Offsets = std::vector<std::int64_t>;

struct Calls {
  Offsets firsts;
  std::int64_t window;
  int kernels, masked;
  std::int64_t batch = 1;
  Offsets documents = {};
};

/// How many kernels a forward, and a backward, of 3 queries a chunk and 12 keys calls.
void expect_calls(const Calls& c) {
  const at::Tensor q = values({c.batch, 2, 6, 8}).requires_grad_();
  const at::Tensor kv = values({c.batch, 2, 12, 8}, 1).requires_grad_();
  std::map<std::string, int> kernels, masked;
  const kernels::FakeMode fake(c10::DeviceType::CPU, [&](const kernels::FakeCall& call) {
    if (call.name.starts_with("aten::_scaled_dot_product_flash_attention_for_cpu")) {
      ++kernels[call.name];
      const std::size_t mask = call.name.ends_with("backward") ? 8 : 5;
      masked[call.name] += call.arguments[mask].isNone() ? 0 : 1;
    }
  });
  detail::chunked_attention(q, kv, kv, c.firsts, c.window, c.documents).sum().backward();
  ASSERT_EQ(kernels.size(), 2U);
  for (const auto& [name, count] : kernels) {
    EXPECT_EQ(count, c.kernels) << name << " with a window of " << c.window;
    EXPECT_EQ(masked[name], c.masked) << name << " with a window of " << c.window;
  }
}

/// {3, 6} of 12 keys are two chunks although they adjoin.
TEST(ChunkedAttention, TakesTwoCallsForAChunkThatIsNotTheFirstAndNoMask) {
  for (const Calls& c : {Calls{{0, 9}, 0, 3, 0}, Calls{{3, 6}, 0, 4, 0}, Calls{{6}, 0, 2, 0},
                         Calls{{0}, 0, 1, 0}, Calls{{3, 9}, 3, 2, 2}, Calls{{3, 9}, 4, 4, 2},
                         Calls{{3, 9}, 5, 6, 2}, Calls{{3, 9}, 12, 4, 0}}) {
    expect_calls(c);
  }
}

TEST(ChunkedAttention, IsThatOfAMaskWithoutKernelsToo) {
  const Tensors mine =
      leaves({values({2, 4, 6, 8}), values({2, 2, 12, 8}, 1), values({2, 2, 12, 8}, 2)});
  const at::Tensor positions = at::tensor({2, 3, 4, 9, 10, 11}), keys = at::arange(12);
  for (const std::int64_t window : {0, 2, 5}) {
    const at::Tensor back = positions.unsqueeze(1) - keys;
    const at::Tensor hidden = back.lt(0).logical_or(back.ge(window > 0 ? window : 12));
    const at::Tensor mask = at::zeros({6, 12}, at::kDouble).masked_fill(hidden, kHidden);
    const Tensors theirs = leaves(mine);
    const at::Tensor expected = attend(theirs, mask);
    expected.square().sum().backward();
    for (const bool flash : {true, false}) {
      at::globalContext().setSDPUseFlash(flash);
      const Tensors own = leaves(mine);
      const at::Tensor result = detail::chunked_attention(own[0], own[1], own[2], {2, 9}, window);
      result.square().sum().backward();
      at::globalContext().setSDPUseFlash(true);
      EXPECT_TRUE(result.allclose(expected, 1e-10, 1e-12)) << window << flash;
      for (std::size_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(own[i].grad().allclose(theirs[i].grad(), 1e-10, 1e-12)) << window << i;
      }
    }
  }
}

/// Chunks [2, 5) and [9, 12) of sequences with documents [0, 3), [3, 10), [10, 12) and [0, 10),
/// [10], [11].
TEST(ChunkedAttention, TakesACallForADocumentThatBeginsInItsChunkAndTwoForOneBeforeIt) {
  // The first sequence: 2 for [2, 3), 1 for [3, 5), 2 for [9, 10), 1 for [10, 12). The second: 2
  // for [2, 5) and for [9, 10), and 1 for each token.
  expect_calls({{2, 9}, 0, 12, 0, 2, {0, 3, 10, 12, 22, 23, 24}});
}

TEST(ChunkedAttention, TakesABatchOfNone) {
  const Tensors own = leaves({values({0, 2, 4, 8}), values({0, 2, 8, 8}), values({0, 2, 8, 8})});
  const at::Tensor result = detail::chunked_attention(own[0], own[1], own[2], {0, 6});
  EXPECT_EQ(result.sizes(), own[0].sizes());
  result.sum().backward();
  EXPECT_EQ(own[1].grad().sizes(), own[1].sizes());
}

TEST(ChunkedAttention, IsOneRanksWhereBatchAndHeadsAreSplit) {
  testing::expect_attention_of_parts(
      {values({3, 4, 6, 8}), values({3, 2, 12, 8}, 1), values({3, 2, 12, 8}, 2)},
      [](const Tensors& t) { return detail::chunked_attention(t[0], t[1], t[2], {3, 9}, 7); });
  testing::expect_attention_of_parts(
      {values({3, 4, 6, 8}), values({3, 2, 12, 8}, 1), values({3, 2, 12, 8}, 2)},
      [](const Tensors& t) {
        return detail::chunked_attention(t[0], t[1], t[2], {3, 9}, 4, {0, 5, 12, 24, 27, 28, 36});
      },
      {Replicate{}, Shard{1}});
}

TEST(ChunkedAttention, Refusals) {
  const at::Tensor two = values({2, 2, 6, 8}), keys = values({2, 2, 12, 8});
  for (const Offsets& wrong :
       {Offsets{0, 12}, {0, 3, 12, 20}, {1, 12, 24}, {0, 13, 24}, {0, 12, 5, 24}}) {
    EXPECT_ERROR(detail::chunked_attention(two, keys, keys, {0, 6}, 0, wrong), "[2, 2, 12, 8]",
                 "one sequence after another");
  }
  const at::Tensor q = values({1, 2, 6, 8}), kv = values({1, 2, 12, 8});
  EXPECT_ERROR(detail::chunked_attention(q, kv, kv, {0, 10}), "3 queries from position 10",
               "12 keys");
  EXPECT_ERROR(detail::chunked_attention(q, kv, kv, {0, 1, 2, 3}), "4 chunks", "equal length");
}

}  // namespace
}  // namespace tessera
