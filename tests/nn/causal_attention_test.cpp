// Attention of documents and within windows against the same with a mask, in fp64: forward and
// backward.
#include "tessera/nn/causal_attention.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "tessera/kernels/fake_mode.h"
#include "testing/case_name.h"
#include "testing/distributed.h"
#include "testing/errors.h"

namespace tessera::nn {
namespace {

using at::Tensor;

/// Lengths of documents, by sequence.
using Lengths = std::vector<std::vector<std::int64_t>>;

struct Packing {
  std::string name;
  Lengths lengths;
  std::int64_t window = 0;
  std::int64_t kv_heads = 4;
  std::int64_t width = 8;
};

std::ostream& operator<<(std::ostream& out, const Packing& packing) {
  return out << packing.name;
}

constexpr std::int64_t kHeads = 4;

Tensor positions_of(const Lengths& lengths) {
  std::vector<Tensor> rows;
  for (const std::vector<std::int64_t>& of_row : lengths) {
    std::vector<Tensor> row;
    for (const std::int64_t length : of_row) {
      row.push_back(at::arange(length, at::kLong));
    }
    rows.push_back(at::cat(row));
  }
  return at::stack(rows);
}

/// The oracle, pair by pair: which key a query sees.
Tensor mask_of(const Packing& packing) {
  std::vector<Tensor> masks;
  for (const std::vector<std::int64_t>& of_row : packing.lengths) {
    std::int64_t tokens = 0;
    for (const std::int64_t length : of_row) {
      tokens += length;
    }
    const Tensor mask = at::zeros({tokens, tokens}, at::kBool);
    auto seen = mask.accessor<bool, 2>();
    std::int64_t begin = 0;
    for (const std::int64_t length : of_row) {
      for (std::int64_t query = begin; query < begin + length; ++query) {
        for (std::int64_t key = begin; key <= query; ++key) {
          seen[query][key] = packing.window == 0 || query - key < packing.window;
        }
      }
      begin += length;
    }
    masks.push_back(mask);
  }
  return at::stack(masks).unsqueeze(1);
}

struct Inputs {
  Tensor q, k, v;
};

/// Leaves as projections make them: (batch, tokens, heads, width), heads in front by a view.
Inputs inputs_of(const Packing& packing) {
  const auto batch = std::ssize(packing.lengths);
  const std::int64_t tokens = positions_of(packing.lengths).size(1);
  const auto leaf = [&](std::int64_t heads, int seed) {
    return testing::values({batch, tokens, heads, packing.width}, seed).requires_grad_();
  };
  return {leaf(kHeads, 0), leaf(packing.kv_heads, 1), leaf(packing.kv_heads, 2)};
}

std::array<Tensor, 4> with_gradients(const Inputs& inputs, const Tensor& mixed) {
  mixed.mul(mixed.add(1)).sum().backward();
  return {mixed.detach(), inputs.q.grad(), inputs.k.grad(), inputs.v.grad()};
}

std::array<Tensor, 4> by_mask(const Packing& packing) {
  const Inputs t = inputs_of(packing);
  return with_gradients(t, attention(t.q.transpose(1, 2), t.k.transpose(1, 2), t.v.transpose(1, 2),
                                     /*causal=*/false, mask_of(packing)));
}

DocumentsPtr documents_of(const Packing& packing) {
  return std::make_shared<const Documents>(positions_of(packing.lengths), at::kCPU);
}

class CausalAttention : public ::testing::TestWithParam<Packing> {};

TEST_P(CausalAttention, EqualsThatWithAMask) {
  const Packing& packing = GetParam();
  const Inputs t = inputs_of(packing);
  const std::array<Tensor, 4> results = with_gradients(
      t, causal_attention(t.q.transpose(1, 2), t.k.transpose(1, 2), t.v.transpose(1, 2),
                          {.window = packing.window, .documents = documents_of(packing)}));
  const std::array<Tensor, 4> expected = by_mask(packing);
  for (std::size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i].sizes(), expected[i].sizes());
    EXPECT_TRUE(at::allclose(results[i], expected[i], 1e-10, 1e-12)) << "of result " << i;
  }
}

TEST_P(CausalAttention, SaysTheSameByTheMaskOfItsDocuments) {
  const Packing& packing = GetParam();
  EXPECT_TRUE(at::equal(documents_of(packing)->mask(packing.window), mask_of(packing)));
}

/// Each rank has two of the four heads, and sends nothing.
TEST_P(CausalAttention, EqualsThatWithAMaskOnSplitHeads) {
  const Packing& packing = GetParam();
  const std::array<Tensor, 4> expected = by_mask(packing);
  RunOnMesh({2}, {"tp"}, [&](const DeviceMesh& mesh) {
    Inputs t = inputs_of(packing);
    for (Tensor* tensor : {&t.q, &t.k, &t.v}) {
      *tensor =
          distribute_tensor(tensor->detach(), mesh, {Shard{2}}).tensor().detach().requires_grad_();
    }
    const StrictScope strict;
    const Tensor mixed =
        causal_attention(t.q.transpose(1, 2), t.k.transpose(1, 2), t.v.transpose(1, 2),
                         {.window = packing.window, .documents = documents_of(packing)});
    const std::array<Tensor, 4> results = with_gradients(t, mixed);
    for (std::size_t i = 0; i < results.size(); ++i) {
      EXPECT_TRUE(at::allclose(testing::full_tensor(results[i]), expected[i], 1e-10, 1e-12))
          << "of result " << i;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(
    Packings, CausalAttention,
    ::testing::Values(Packing{"OneDocument", {{9}}}, Packing{"ADocumentEach", {{9}, {9}}},
                      Packing{"Uneven", {{5, 1, 3}, {2, 7}, {9}}},
                      Packing{"OfOneToken", {{1, 1, 1, 1}, {1, 2, 1}}},
                      Packing{"GroupedHeads", {{5, 1, 3}, {2, 7}}, 0, 2},
                      Packing{"WidthOf6", {{5, 4}, {2, 7}}, 0, 2, 6},
                      Packing{"InAWindow", {{5, 1, 13}, {17, 2}}, 4, 2},
                      Packing{"WindowBeyondDocuments", {{5, 1, 3}, {2, 7}}, 8},
                      Packing{"WindowBeyondAll", {{9}, {9}}, 30},
                      Packing{"WindowOfOne", {{6, 3}, {9}}, 1},
                      Packing{"LongSequencesInAWindow", {{300}, {300}}, 5, 2},
                      Packing{"LongSequencesInALongWindow", {{500}}, 140, 2},
                      Packing{"LongDocumentsInAWindow", {{270, 30}, {1, 299}}, 40, 2},
                      Packing{"TailOfOneQuery", {{257}}, 128}),
    testing::name_of_case<Packing>);

TEST(CausalAttentionOf, DocumentsOfOtherSizesIsRefused) {
  const Tensor q = at::zeros({2, 4, 9, 8});
  const DocumentsPtr documents = documents_of({"", {{5, 3}, {8}}});
  EXPECT_ERROR(causal_attention(q, q, q, {.documents = documents}), "2 sequences of 9 tokens",
               "documents of 2 sequences of 8");
  // As many tokens, in other sequences.
  for (const Packing& other : {Packing{"", {{7, 11}}}, Packing{"", {{6}, {6}, {6}}}}) {
    EXPECT_ERROR(causal_attention(q, q, q, {.documents = documents_of(other)}),
                 "2 sequences of 9 tokens", "make them of the positions");
  }
}

TEST(CausalAttentionOf, KeysThatDoNotFitIsRefused) {
  const Tensor q = at::zeros({2, 4, 9, 8});
  for (const Tensor& other :
       {at::zeros({2, 3, 9, 8}), at::zeros({2, 0, 9, 8}), at::zeros({1, 4, 9, 8}),
        at::zeros({2, 4, 7, 8}), at::zeros({4, 9, 8})}) {
    EXPECT_ERROR(causal_attention(q, other, other, {.window = 3}), "queries of sizes [2, 4, 9, 8]",
                 "heads that divide them");
  }
  EXPECT_ERROR(causal_attention(q, q, q, {.window = -1}), "window of -1", "0 for all");
}

/// The first block, which has as many queries as the window, needs none.
TEST(CausalAttentionOf, LongWindowKeepsAMaskOfASmallBlockAlone) {
  constexpr std::int64_t kWindow = 2048, kBlock = 512;
  const Tensor q = at::zeros({1, 1, 2 * kWindow, 8});
  std::int64_t largest = 0;
  const kernels::FakeMode fake(c10::DeviceType::CPU, [&](const kernels::FakeCall& call) {
    for (const Tensor& result : call.results) {
      largest = std::max(largest, result.numel());
    }
  });
  causal_attention(q, q, q, {.window = kWindow});
  EXPECT_EQ(largest, kBlock * (kBlock + kWindow - 1));
}

TEST(CausalAttentionOf, SplitBatchesIsRefused) {
  RunOnMesh({2}, {"dp"}, [](const DeviceMesh& mesh) {
    const Tensor q = distribute_tensor(at::zeros({2, 4, 9, 8}), mesh, {Shard{0}}).tensor();
    const DocumentsPtr documents = documents_of({"", {{5, 4}, {9}}});
    EXPECT_ERROR(causal_attention(q, q, q, {.documents = documents}), "split by heads alone");
  });
}

TEST(CausalAttentionOf, NoSequencesIsEmpty) {
  const Tensor q = at::zeros({0, 4, 9, 8});
  const auto documents = std::make_shared<const Documents>(at::zeros({0, 9}, at::kLong), at::kCPU);
  EXPECT_EQ(causal_attention(q, q, q, {.documents = documents}).sizes(), q.sizes());
}

TEST(DocumentsOf, PositionsAreWhereTheyBegin) {
  const Documents documents(positions_of({{2, 3}, {5}, {1, 4}}), at::kCPU);
  EXPECT_EQ(documents.offsets(), (std::vector<std::int64_t>{0, 2, 5, 10, 11, 15}));
  EXPECT_EQ(documents.longest(), 5);
  EXPECT_FALSE(documents.are_sequences());
  EXPECT_TRUE(at::equal(documents.device_offsets(), at::tensor({0, 2, 5, 10, 11, 15}, at::kInt)));
}

/// A part of a document may begin a sequence, at any position of it.
TEST(DocumentsOf, SequencesBeginWithOne) {
  const Documents documents(at::tensor({7, 8, 0, 3, 4, 5}, at::kLong).view({2, 3}), at::kCPU);
  EXPECT_EQ(documents.offsets(), (std::vector<std::int64_t>{0, 2, 3, 6}));
  EXPECT_TRUE(
      Documents(at::tensor({7, 8, 9, 3, 4, 5}, at::kLong).view({2, 3}), at::kCPU).are_sequences());
}

TEST(PackedKernel, IsFlashWhereCudnnWouldBeTaken) {
  EXPECT_EQ(to_string(packed_kernel({at::SDPBackend::cudnn_attention})), "flash");
  EXPECT_EQ(to_string(packed_kernel({at::SDPBackend::efficient_attention, true})),
            "efficient, key-value heads repeated");
}

}  // namespace
}  // namespace tessera::nn
