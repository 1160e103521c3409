// Tests parallelize(): the memory of a Llama under FSDP, steps with late ranks, and the gradients
// of a model that is not a Llama.

#include <chrono>
#include <set>
#include <thread>
#include <tuple>

#include "models/llama_run.h"
#include "tessera/models/llama_config.h"
#include "tessera/models/parallelize.h"
#include "tessera/tessera.hpp"
#include "testing/distributed.h"
#include "testing/forwarding_communicator.h"
#include "testing/memory.h"
#include "testing/module_values.h"

namespace tessera::models {
namespace {

struct Sharding {
  const char* name;
  std::int64_t replicas, dp;
  bool reshard_after_forward = true;
  std::int64_t post_forward_mesh_size = 1;
};

std::int64_t local_bytes(const at::Tensor& tensor) {
  return static_cast<std::int64_t>(local_tensor(tensor).nbytes());
}

/// Runs a step. Returns the bytes of this rank's gradients and AdamW averages.
std::int64_t bytes_of_step(Llama& model, const Part& part) {
  const std::vector<nn::SlotPtr> slots = optim::slots_of(model);
  optim::AdamW optimizer(slots, {});
  run_backward(model, kOddShape, part, 0);
  std::int64_t bytes = 0;
  for (const auto& slot : slots) {
    bytes += local_bytes(slot->persistent().grad());
  }
  optimizer.step();
  for (const auto& state : optimizer.state()) {
    if (state.name != "step") {
      bytes += local_bytes(state.tensor);
    }
  }
  return bytes;
}

std::int64_t bytes_on(Rank& rank, std::int64_t replicas, std::int64_t dp) {
  const auto model = make_llama(kOddShape);
  parallelize(*model, rank.mesh({replicas, dp, 1}, {"dp_replicate", "dp", "tp"}),
              {.fsdp = {.reshard_after_forward = false}});
  return bytes_of_step(*model, {.part = rank.rank(), .parts = rank.size()});
}

TEST_ON_RANKS(FsdpMemory, OfZero2IsAQuarterOfReplication, 4) {
  const std::int64_t replicated = bytes_on(rank, 4, 1);
  const std::int64_t sharded = bytes_on(rank, 1, 4);
  const ParameterCount count = count_parameters(detail::parse_config(kOddShape.config, "test"));
  EXPECT_EQ(replicated, count.total * 3 * 4);
  // Each of 4 ranks stores a quarter of the bytes and at most one more row of each parameter.
  EXPECT_LT(static_cast<double>(sharded), 0.27 * static_cast<double>(replicated));
}

constexpr Shape kWideShape{
    R"({"vocab_size": 1009, "hidden_size": 60, "intermediate_size": 120, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.1})",
    4, 9};

/// Returns the peak memory of a step minus the memory before the step.
std::int64_t peak_of_step(Rank& rank, bool with_units) {
  const auto model = make_llama(kWideShape);
  const DeviceMesh mesh = rank.mesh({4, 1}, {"dp", "tp"});
  if (with_units) {
    parallelize(*model, mesh, {});
  } else {
    for (nn::ModuleBase* block : model->blocks()) {
      fsdp::fully_shard(*block, mesh["dp"]);
    }
    fsdp::fully_shard(*model, mesh["dp"]);
  }
  const Part part{.part = rank.rank(), .parts = rank.size()};
  run_backward(*model, kWideShape, part, 0);  // warm-up: the first step needs more memory
  const testing::MemoryScope memory;
  run_backward(*model, kWideShape, part, 1);
  return memory.peak();
}

TEST_ON_RANKS(FsdpMemory, NeverContainsBothEmbeddingAndHead, 4) {
  const std::int64_t together = peak_of_step(rank, false);
  const std::int64_t apart = peak_of_step(rank, true);
  const std::int64_t table = 1009 * 60 * 4;
  EXPECT_LT(apart, together - table) << together << " bytes together, a table has " << table;
}

using nn::ModuleBase;
using nn::TensorList;
enum class Stage { kNone, kForward, kBackward, kAllGather, kReduceScatter, kAllReduce, kStep };

std::string to_string(Stage stage) {
  constexpr const char* kNames[] = {"None",          "Forward",   "Backward", "AllGather",
                                    "ReduceScatter", "AllReduce", "Step"};
  return kNames[static_cast<int>(stage)];
}

/// Makes one rank late each time that the ranks reach the point `stage` of a step: first rank 0,
/// then rank 1. Each rank has its own Lateness.
class Lateness {
 public:
  Lateness(const Rank& rank, Stage stage, std::chrono::milliseconds delay)
      : rank_(rank), stage_(stage), delay_(delay) {}

  void pass(Stage stage) {
    if (stage != stage_) {
      return;
    }
    if (rank_.rank() == passed_++ % rank_.size()) {
      std::this_thread::sleep_for(delay_);
    }
  }
  int passed() const { return passed_; }

  /// Returns a world whose collectives call pass(), except collectives without a purpose text
  /// (comm::PurposeScope). The Lateness must outlive the world.
  comm::WorldPtr world() {
    return std::make_shared<testing::WrappedWorld>(
        rank_.world(), [this](comm::CommunicatorPtr group, const std::string&) {
          return comm::CommunicatorPtr(std::make_shared<Late>(std::move(group), *this));
        });
  }

 private:
  class Late final : public testing::ForwardingCommunicator {
   public:
    Late(comm::CommunicatorPtr inner, Lateness& lateness)
        : ForwardingCommunicator(std::move(inner)), lateness_(lateness) {}

    comm::WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
      be_late(Stage::kAllGather);
      return inner().all_gather(output, input);
    }
    comm::WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                                   const std::vector<at::Tensor>& inputs) override {
      be_late(Stage::kAllGather);
      return inner().all_gather_group(outputs, inputs);
    }
    comm::WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
      be_late(Stage::kAllReduce);
      return inner().all_reduce(tensor, op);
    }
    comm::WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                 ReduceOp op) override {
      be_late(Stage::kReduceScatter);
      return inner().reduce_scatter(output, input, op);
    }
    comm::WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                                       const std::vector<at::Tensor>& inputs,
                                       ReduceOp op) override {
      be_late(Stage::kReduceScatter);
      return inner().reduce_scatter_group(outputs, inputs, op);
    }

   private:
    void be_late(Stage stage) {
      if (!purpose().empty()) {
        lateness_.pass(stage);
      }
    }

    Lateness& lateness_;
  };

  Rank rank_;
  Stage stage_;
  std::chrono::milliseconds delay_;
  int passed_ = 0;
};

constexpr std::int64_t kDelayedTp = 2;

void delay_block(ModuleBase& block, Lateness& lateness) {
  block.add_forward_hook([&lateness](ModuleBase&, TensorList outputs) {
    lateness.pass(Stage::kForward);
    outputs[0]->register_hook([&lateness](const at::Tensor&) { lateness.pass(Stage::kBackward); });
  });
}

Outcome train_late(const Shape& shape, const Sharding& run, Lateness& lateness) {
  const DeviceMesh mesh = init_device_mesh(lateness.world(), {run.replicas, run.dp, kDelayedTp},
                                           {"dp_replicate", "dp", "tp"});
  const DeviceMesh used = run.replicas > 1 ? mesh : mesh[{"dp", "tp"}];
  const auto model = make_llama(shape);
  parallelize(*model, used,
              {.fsdp = {.reshard_after_forward = run.reshard_after_forward,
                        .post_forward_mesh_size = run.post_forward_mesh_size}});
  for (ModuleBase* block : model->blocks()) {
    delay_block(*block, lateness);
  }
  const DeviceMesh data = data_mesh(used).flatten();
  return train(*model, shape,
               {.part = data.local_rank(), .parts = data.size(), .before_step = [&lateness] {
                  lateness.pass(Stage::kStep);
                }});
}

using DelayedCase = std::tuple<Sharding, Stage>;

class FsdpDelays : public ::testing::TestWithParam<DelayedCase> {};

TEST_P(FsdpDelays, DoNotChangeResults) {
  const auto& [run, stage] = GetParam();
  Shape shape = kOddShape;
  shape.steps = 1;
  RunRanks(static_cast<int>(run.replicas * run.dp * kDelayedTp),
           [&, run = run, stage = stage](Rank& rank) {
             constexpr std::chrono::milliseconds kDelay(100);
             Lateness none(rank, Stage::kNone, kDelay), lateness(rank, stage, kDelay);
             const Outcome prompt = train_late(shape, run, none);
             const Outcome late = train_late(shape, run, lateness);
             EXPECT_GE(lateness.passed(), 1);
             EXPECT_EQ(prompt.losses, late.losses);
             EXPECT_EQ(prompt.norms, late.norms);
             for (std::size_t i = 0; i < prompt.parameters.size(); ++i) {
               EXPECT_EQUAL(prompt.gradients[i], late.gradients[i]) << prompt.names[i];
               EXPECT_EQUAL(prompt.parameters[i], late.parameters[i]) << prompt.names[i];
             }
           });
}

constexpr Stage kEveryStage[] = {Stage::kForward, Stage::kBackward, Stage::kAllGather,
                                 Stage::kReduceScatter, Stage::kStep};

std::string name_of_delay(const ::testing::TestParamInfo<DelayedCase>& info) {
  return std::string(std::get<0>(info.param).name) + "_" + to_string(std::get<1>(info.param));
}

constexpr Sharding kDelayedHybrid{"Hsdp", 2, 2};

INSTANTIATE_TEST_SUITE_P(
    Stages, FsdpDelays,
    ::testing::Combine(::testing::Values(Sharding{"Zero2", 1, 2, false}, Sharding{"Zero3", 1, 2},
                                         Sharding{"Hpz", 1, 4, true, 2}, kDelayedHybrid),
                       ::testing::ValuesIn(kEveryStage)),
    name_of_delay);
INSTANTIATE_TEST_SUITE_P(AllReduce, FsdpDelays,
                         ::testing::Combine(::testing::Values(kDelayedHybrid),
                                            ::testing::Values(Stage::kAllReduce)),
                         name_of_delay);

// Vocabulary, hidden and inner sizes are odd, so two ranks get uneven shards.
constexpr std::int64_t kVocabulary = 11, kHidden = 5, kInner = 7, kRows = 12;

struct Layer : nn::Module<Layer> {
  at::Tensor forward(const at::Tensor& x) { return x + mlp(norm(x)); }
  nn::Child<nn::RMSNorm> norm{*this, "norm", kHidden};
  nn::Child<nn::SwiGlu> mlp{*this, "mlp", nn::MlpOptions{.hidden = kHidden, .inner = kInner}};
};

/// Maps token ids (rows) to logits (rows, vocabulary).
struct Stack : nn::Module<Stack>, tensor_parallel::DeclaresPlan, DeclaresUnits {
  Stack() {
    for (int i = 0; i < 2; ++i) {
      layers->push_back(std::make_shared<Layer>());
    }
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = embed(tokens);
    for (std::size_t i = 0; i < layers->size(); ++i) {
      x = (*layers->at<Layer>(i))(x);
    }
    return head(x);
  }
  tensor_parallel::ParallelizePlan tensor_parallel_plan(
      const DeviceMesh&, const tensor_parallel::DeclaredPlanOptions&) const override {
    using namespace tensor_parallel;
    return joined({embedding_plan("embed"),
                   swi_glu_plan("layers.*.mlp"),
                   {{"head", colwise_parallel({.output_layouts = Shard{-1}})}}});
  }
  std::vector<nn::ModuleBase*> blocks() const override {
    return {layers->items().at(0).get(), layers->items().at(1).get()};
  }
  std::vector<std::vector<nn::ModuleBase*>> fsdp_units() override {
    return {{&*embed}, {blocks().at(0)}, {blocks().at(1)}, {this}};
  }
  nn::Child<nn::Embedding> embed{*this, "embed", kVocabulary, kHidden};
  nn::Child<nn::ModuleList> layers{*this, "layers"};
  nn::Child<nn::Linear> head{*this, "head", kHidden, kVocabulary};
};

std::shared_ptr<Stack> make_stack() {
  const auto model = std::make_shared<Stack>();
  nn::init_weights(*model, 7);
  model->to(c10::kDouble);
  return model;
}

at::Tensor loss_of(Stack& model, std::int64_t first, std::int64_t last) {
  const at::Tensor row = at::arange(first, last, c10::kLong);
  return tensor_parallel::cross_entropy(model((row * row).remainder(kVocabulary)),
                                        (3 * row).remainder(kVocabulary));
}

/// The sizes of a mesh ("dp_replicate", "dp", "tp"), and options of parallelize().
struct StackMesh {
  std::int64_t replicas, dp, tp;
  ActivationMemory activations;
  fsdp::Options fsdp{};
};

class ParallelizedStack : public ::testing::TestWithParam<StackMesh> {};

TEST_P(ParallelizedStack, HasTheGradientsOfOneRank) {
  const StackMesh& c = GetParam();
  const auto alone = make_stack();
  loss_of(*alone, 0, kRows).backward();
  RunRanks(static_cast<int>(c.replicas * c.dp * c.tp), [&](Rank& rank) {
    const DeviceMesh mesh = rank.mesh({c.replicas, c.dp, c.tp}, {"dp_replicate", "dp", "tp"});
    const auto model = make_stack();
    parallelize(*model, mesh, {.fsdp = c.fsdp, .activations = c.activations});
    const DeviceMesh data = data_mesh(mesh).flatten();
    const std::int64_t rows = kRows / data.size(), first = data.local_rank() * rows;
    loss_of(*model, first, first + rows).backward();
    testing::expect_gradients(*model, testing::gradients_of(*alone), 1, 1e-10, 1e-10);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, ParallelizedStack,
    ::testing::Values(
        StackMesh{1, 1, 3, ActivationMemory::kAll}, StackMesh{1, 2, 2, ActivationMemory::kInputs},
        StackMesh{1, 3, 1, ActivationMemory::kMatmuls},
        StackMesh{1, 4, 1, ActivationMemory::kAll, {.reshard_after_forward = false}},
        StackMesh{1,
                  4,
                  2,
                  ActivationMemory::kInputs,
                  {.reshard_after_forward = true, .post_forward_mesh_size = 2}},
        StackMesh{2, 3, 1, ActivationMemory::kInputs},
        StackMesh{2, 3, 1, ActivationMemory::kAll, {.reshard_after_forward = false}},
        StackMesh{2, 2, 2, ActivationMemory::kMatmuls, {.offload_policy = fsdp::OffloadPolicy{}}}));

/// Returns the names of the modules whose parameters are still unsharded after forward.
std::set<std::string> gathered_between(const DeviceMesh& mesh, bool reshard_last) {
  const auto model = make_stack();
  parallelize(*model, mesh, {.reshard_last = reshard_last});
  const at::Tensor loss = loss_of(*model, 0, kRows);
  std::set<std::string> gathered;
  for (const auto& [name, slot] : model->named_slots()) {
    if (slot->role.gathered) {
      gathered.insert(name.substr(0, name.starts_with("layers.") ? 8 : 4));
    }
  }
  loss.backward();
  return gathered;
}

TEST_ON_MESH(Parallelize, KeepsTheFirstUnitsOfBackwardGathered, {2, 1}, {"dp", "tp"}) {
  EXPECT_EQ(gathered_between(mesh, false), (std::set<std::string>{"layers.1", "head"}));
  EXPECT_EQ(gathered_between(mesh, true), std::set<std::string>{});
}

TEST_ON_MESH(Parallelize, RefusesAModelThatDeclaresNoUnits, {1, 1}, {"dp", "tp"}) {
  Layer layer;
  EXPECT_ERROR(parallelize(layer, mesh, {}), "not derived from models::DeclaresUnits");
}

TEST_ON_MESH(Parallelize, RefusesContextParallelismForAnUnsupportedModel, {1, 2, 1},
             {"dp", "cp", "tp"}) {
  Stack model;
  EXPECT_ERROR(parallelize(model, mesh, {}), "context parallelism over 2 ranks");
}

}  // namespace
}  // namespace tessera::models
