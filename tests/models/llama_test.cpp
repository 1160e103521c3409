// Compares a Llama on meshes to the same Llama on one rank, for packed documents, context
// parallelism, few key-value heads, and generation.

#include "tessera/models/llama.h"
#include "models/llama_run.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/models/llama_config.h"
#include "tessera/models/parallelize.h"
#include "tessera/nn/initialization.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::models {
namespace {

constexpr Shape kPacked{
    R"({"vocab_size": 61, "hidden_size": 40, "intermediate_size": 37, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6, "initializer_range": 0.2,
        "attention_bias": true})",
    3, 12};
/// The numbers of tokens of the documents in each sequence.
const std::vector<std::vector<std::int64_t>> kLengths{{5, 1, 6}, {12}, {1, 1, 10}};

struct PackedRun {
  std::int64_t tp = 1;
  std::int64_t window = 0;
  ActivationMemory activations = ActivationMemory::kAll;
};

std::shared_ptr<Llama> make_packed_llama(const PackedRun& run) {
  LlamaConfig config = detail::parse_config(kPacked.config, "test");
  config.sliding_window = run.window;
  const auto model = std::make_shared<Llama>(config, kPacked.sequence);
  nn::init_weights(*model, 7);
  model->to(c10::kDouble);
  return model;
}

at::Tensor packed_tokens() {
  return tokens_of(kPacked, 61, 0, 0, kPacked.batch).slice(1, 0, -1);
}

/// Returns a Llama after backward of the summed loss; each document had a forward call of its own.
std::shared_ptr<Llama> trained_by_document(const PackedRun& run) {
  const auto model = make_packed_llama(run);
  const at::Tensor tokens = packed_tokens();
  for (std::size_t row = 0; row < kLengths.size(); ++row) {
    std::int64_t begin = 0;
    for (const std::int64_t length : kLengths[row]) {
      const at::Tensor own = tokens[static_cast<std::int64_t>(row)].narrow(0, begin, length);
      tensor_parallel::cross_entropy((*model)(own.unsqueeze(0)), own).mul(length).backward();
      begin += length;
    }
  }
  return model;
}

class PackedDocuments : public ::testing::TestWithParam<PackedRun> {};

TEST_P(PackedDocuments, HaveTheGradientsOfSeparateDocuments) {
  const PackedRun& run = GetParam();
  const auto gradients = testing::gradients_of(*trained_by_document(run));
  RunRanks(static_cast<int>(run.tp), [&](Rank& rank) {
    const auto model = make_packed_llama(run);
    parallelize(*model, rank.mesh({1, run.tp}, {"dp", "tp"}), {.activations = run.activations});
    const StrictScope strict;
    const at::Tensor tokens = packed_tokens();
    tensor_parallel::cross_entropy(
        (*model)(tokens, static_cast<KvCache*>(nullptr), testing::document_positions(kLengths)),
        tokens.flatten())
        .mul(tokens.numel())
        .backward();
    testing::expect_gradients(*model, gradients, 1, 1e-10, 1e-10);
  });
}

INSTANTIATE_TEST_SUITE_P(Runs, PackedDocuments,
                         ::testing::Values(PackedRun{}, PackedRun{1, 4}, PackedRun{2},
                                           PackedRun{2, 4, ActivationMemory::kMatmuls},
                                           PackedRun{2, 0, ActivationMemory::kInputs}));

/// Counts results of operators that are as large as an attention mask (tokens x tokens).
struct MaskCounter final : OperatorMode {
  explicit MaskCounter(std::int64_t tokens) : least(tokens * tokens) {}
  Results call(const Operator&, const std::function<Results()>& run) override {
    Results results = run();
    for (const c10::IValue& result : results) {
      count += result.isTensor() && result.toTensor().numel() >= least ? 1 : 0;
    }
    return results;
  }
  std::int64_t least;
  int count = 0;
};

TEST(Llama, MakesNoMaskForAWindowOrDocuments) {
  LlamaConfig config = detail::parse_config(kPacked.config, "test");
  for (const std::int64_t window : {0, 20}) {
    config.sliding_window = window;
    Llama model(config, 400);
    nn::init_weights(model, 7);
    const at::Tensor tokens = at::randint(61, {1, 400}, c10::kLong);
    const at::Tensor positions = at::arange(400, c10::kLong).remainder(130).unsqueeze(0);
    MaskCounter masks(400);
    const OperatorModeScope scope(masks);
    model(tokens).sum().backward();
    model(tokens, static_cast<KvCache*>(nullptr), positions).sum().backward();
    EXPECT_EQ(masks.count, 0) << "with a window of " << window;
  }
}

// Context parallelism splits the 24 tokens evenly. Few sizes of the model are divisible by tp.
constexpr Shape kSplitShape{
    R"({"vocab_size": 61, "hidden_size": 40, "intermediate_size": 37, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6, "initializer_range": 0.2,
        "attention_bias": true, "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
        "max_position_embeddings": 16})",
    6, 24};

/// Sizes of a mesh ("dp_replicate", "dp", "cp" if above 1, "tp"), and options of the model.
struct SplitMesh {
  std::int64_t replicas, dp, cp, tp;
  bool sequence_parallel = true;
  ActivationMemory activations = ActivationMemory::kAll;
  std::int64_t window = 0;
  bool documents = false;
  bool in_parts = false;  ///< `in_parts`: computes the loss in chunks
};

std::shared_ptr<Llama> make_split_llama(const SplitMesh& c) {
  LlamaConfig config = detail::parse_config(kSplitShape.config, "test");
  config.sliding_window = c.window;
  const auto model = std::make_shared<Llama>(config, kSplitShape.sequence);
  nn::init_weights(*model, 7);
  model->to(c10::kDouble);
  return model;
}

/// Each document has 7 tokens. A sequence can begin inside a document.
at::Tensor document_positions(std::int64_t first, std::int64_t last) {
  std::vector<at::Tensor> rows;
  for (std::int64_t row = first; row < last; ++row) {
    rows.push_back((at::arange(kSplitShape.sequence, c10::kLong) + row % 7).remainder(7));
  }
  return at::stack(rows);
}

/// Runs backward of the mean loss over the tokens of this rank in rows [first, last) of the batch.
double step_of_rows(Llama& model, const SplitMesh& c, std::int64_t first, std::int64_t last) {
  const at::Tensor tokens = tokens_of(kSplitShape, model.config().vocab_size, 0, first, last);
  at::Tensor inputs = tokens.slice(1, 0, -1), targets = tokens.slice(1, 1);
  if (const auto& split = model.context_parallel()) {
    inputs = split->shard(inputs, 1);
    targets = split->shard(targets, 1);
  }
  const at::Tensor positions = c.documents ? document_positions(first, last) : at::Tensor();
  const at::Tensor loss =
      c.in_parts ? model(inputs, HeadLoss{targets.flatten(), {.chunks = 3}, positions})
                 : tensor_parallel::cross_entropy(
                       model(inputs, static_cast<KvCache*>(nullptr), positions), targets.flatten());
  loss.backward();
  return loss.item<double>();
}

DeviceMesh split_mesh(const Rank& rank, const SplitMesh& c) {
  if (c.cp == 1) {
    return rank.mesh({c.dp, c.tp}, {"dp", "tp"});
  }
  return c.replicas > 1
             ? rank.mesh({c.replicas, c.dp, c.cp, c.tp}, {"dp_replicate", "dp", "cp", "tp"})
             : rank.mesh({c.dp, c.cp, c.tp}, {"dp", "cp", "tp"});
}

class ContextParallelLlama : public ::testing::TestWithParam<SplitMesh> {};

TEST_P(ContextParallelLlama, HasTheLossAndGradientsOfOneRank) {
  const SplitMesh& c = GetParam();
  const auto alone = make_split_llama(c);
  const double loss = step_of_rows(*alone, c, 0, kSplitShape.batch);
  RunRanks(static_cast<int>(c.replicas * c.dp * c.cp * c.tp), [&](Rank& rank) {
    const DeviceMesh mesh = split_mesh(rank, c);
    const auto model = make_split_llama(c);
    parallelize(*model, mesh,
                {.sequence_parallel = c.sequence_parallel, .activations = c.activations});
    const StrictScope strict;
    const DeviceMesh batches = batch_mesh(mesh).flatten();
    const std::int64_t rows = kSplitShape.batch / batches.size();
    const std::int64_t first = batches.local_rank() * rows;
    at::Tensor mean = at::full({1}, step_of_rows(*model, c, first, first + rows), c10::kDouble);
    if (const DeviceMesh data = data_mesh(mesh).flatten(); data.size() > 1) {
      data.group().all_reduce(mean, ReduceOp::kAvg)->wait();
    }
    EXPECT_NEAR(mean.item<double>(), loss, 1e-10);
    testing::expect_gradients(*model, testing::gradients_of(*alone), 1, 1e-10, 1e-10);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, ContextParallelLlama,
    ::testing::Values(SplitMesh{1, 1, 2, 1}, SplitMesh{1, 1, 3, 1},
                      SplitMesh{1, 1, 4, 1, true, ActivationMemory::kInputs},
                      SplitMesh{1, 1, 2, 2, false}, SplitMesh{1, 1, 3, 2},
                      SplitMesh{1, 1, 4, 2, true, ActivationMemory::kMatmuls},
                      SplitMesh{1, 2, 2, 2, true, ActivationMemory::kAll, 5},
                      SplitMesh{1, 1, 2, 4, true, ActivationMemory::kInputs, 0, true},
                      SplitMesh{2, 1, 2, 1, true, ActivationMemory::kAll, 0, false, true},
                      SplitMesh{1, 3, 2, 1, true, ActivationMemory::kAll, 9, true},
                      // 4 or 8 tp ranks share the 2 key-value heads.
                      SplitMesh{1, 1, 1, 4}, SplitMesh{1, 1, 1, 8, false},
                      SplitMesh{1, 2, 1, 4, true, ActivationMemory::kInputs}));

TEST_ON_RANKS(ContextParallelGeneration, IsRefusedWithACache, 2) {
  const SplitMesh c{1, 1, 2, 1};
  const auto model = make_split_llama(c);
  parallelize(*model, split_mesh(rank, c), {});
  KvCache cache = model->new_cache(8);
  EXPECT_ERROR((*model)(at::arange(8).view({1, 8}), &cache), "cache", "context parallelism");
  EXPECT_ERROR((*model)(at::arange(7).view({1, 7})), "14 tokens", "multiple of 4");
}

TEST_ON_MESH(FewKeyValueHeads, HaveTheInitialWeightsOfOneRank, {1, 4}, {"dp", "tp"}) {
  const auto alone = make_llama(kSplitShape);
  const auto model = testing::made_on_meta<Llama>(alone->config(), kSplitShape.sequence);
  parallelize(*model, mesh, {});
  nn::to_empty(*model, c10::kCPU);
  nn::init_weights(*model, 7);
  const auto expected = alone->named_slots();
  std::size_t i = 0;
  for (const auto& [name, slot] : model->named_slots()) {
    EXPECT_EQUAL(slot->persistent(), expected[i++].second->get().detach()) << name;
  }
}

LlamaConfig SmallConfig() {
  return detail::parse_config(R"({"vocab_size": 61, "hidden_size": 64, "intermediate_size": 40,
                          "num_hidden_layers": 2, "num_attention_heads": 4,
                          "num_key_value_heads": 4, "initializer_range": 0.1})",
                              "test");
}

class Generation : public ::testing::Test {
 protected:
  Generation() : model_(SmallConfig(), 32) { nn::init_weights(model_, 7); }

  c10::NoGradGuard no_grad_;
  Llama model_;
};

TEST_F(Generation, CachedLogitsEqualLogitsOfTheWholeSequence) {
  const at::Tensor tokens = at::randint(61, {1, 12}, c10::kLong);
  const at::Tensor whole = model_(tokens);
  KvCache cache = model_.new_cache(12);
  const at::Tensor prompt = model_(tokens.slice(1, 0, 5), &cache);
  EXPECT_CLOSE(prompt[0], whole[4], 1e-5, 1e-5);
  for (std::int64_t i = 5; i < 12; ++i) {
    const at::Tensor next = model_(tokens.slice(1, i, i + 1), &cache);
    EXPECT_CLOSE(next[0], whole[i], 1e-5, 1e-5) << "token " << i;
  }
  EXPECT_ERROR(model_(tokens.slice(1, 0, 1), &cache), "position 13 ", "the cache was made for");
}

TEST_F(Generation, RefusesInvalidCalls) {
  const auto tokens = [](std::int64_t texts, std::int64_t count) {
    return at::randint(61, {texts, count}, c10::kLong);
  };
  KvCache filled = model_.new_cache(8), of_two = model_.new_cache(8, {0, 2});
  model_(tokens(1, 4), &filled);
  testing::expect_refusals({
      {"positions", [&] { model_(tokens(1, 33)); }, {"position 33 "}},
      {"tokens",
       [&] { model_(tokens(1, 2), &filled); },
       {"2 tokens were passed with a filled cache"}},
      {"texts",
       [&] { model_(tokens(3, 4), &of_two); },
       {"tokens of 3 sequences were passed with a cache for 2"}},
  });
}

class BatchedGeneration : public ::testing::TestWithParam<std::int64_t> {};

TEST_P(BatchedGeneration, EqualsGenerationOfSingleTexts) {
  const c10::NoGradGuard no_grad;
  LlamaConfig config = SmallConfig();
  config.sliding_window = GetParam();
  Llama model(config, 32);
  nn::init_weights(model, 7);
  const std::int64_t longest = 7, steps = 9;
  const std::vector<std::int64_t> padding{5, 0, 2};
  const at::Tensor tokens = at::randint(61, {3, longest + steps}, c10::kLong);
  KvCache cache = model.new_cache(longest + steps, padding);
  at::Tensor logits = model(tokens.slice(1, 0, longest), &cache);
  for (std::int64_t end = longest;; ++end) {
    for (std::int64_t i = 0; i < 3; ++i) {
      const at::Tensor alone =
          model(tokens.slice(0, i, i + 1).slice(1, padding[static_cast<std::size_t>(i)], end))[-1];
      EXPECT_CLOSE(logits[i], alone, 1e-4, 1e-5) << "text " << i << ", " << end;
    }
    if (end == longest + steps) {
      break;
    }
    logits = model(tokens.slice(1, end, end + 1), &cache);
  }
}

// The sizes of attention windows; 0: no window. In a small window, late tokens see no padding.
INSTANTIATE_TEST_SUITE_P(Windows, BatchedGeneration, ::testing::Values(0, 10, 6, 3, 1));

TEST(Dropout, IsAppliedOnlyInTraining) {
  const c10::NoGradGuard no_grad;
  Llama plain(SmallConfig(), 32);
  Llama dropping(SmallConfig(), 32, /*dropout=*/0.5);
  for (Llama* model : {&plain, &dropping}) {
    nn::init_weights(*model, 7);
  }
  const at::Tensor tokens = at::randint(61, {2, 12}, c10::kLong);
  const at::Tensor want = plain(tokens);
  EXPECT_FALSE(at::allclose(dropping(tokens), want));
  dropping.eval();
  EXPECT_EQUAL(dropping(tokens), want);
}

}  // namespace
}  // namespace tessera::models
