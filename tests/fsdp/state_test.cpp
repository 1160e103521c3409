// Tests the phases of iterations, units and gathers; training after calls in an unusual order; unit
// names in errors; frozen parameters; settings that change between steps.

#include <c10/core/InferenceMode.h>

#include "fsdp/state.h"
#include "fsdp/training/training.h"
#include "fsdp/unit.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/optimizer.h"

namespace tessera::fsdp::state {

template <class P>
bool is_legal(P from, P to) {
  return std::ranges::any_of(legal_transitions<P>(), [&](const Transition<P>& transition) {
    return transition.from == from && transition.to == to;
  });
}

/// Tests all pairs of phases: an illegal transition must throw and leave the phase unchanged.
template <class P>
void expect_table_is_enforced(int phases) {
  for (int i = 0; i < phases * phases; ++i) {
    const P from = static_cast<P>(i / phases);
    const P to = static_cast<P>(i % phases);
    Phase<P> phase(from);
    if (is_legal(from, to)) {
      phase.enter(to, "unit 'a'");
      EXPECT_EQ(phase.now(), to);
      continue;
    }
    EXPECT_ERROR(phase.enter(to, "unit 'a'"), "unit 'a'", to_string(from), to_string(to));
    EXPECT_EQ(phase.now(), from);
  }
}

TEST(Phase, RefusesTransitionsMissingFromTheTable) {
  expect_table_is_enforced<IterationPhase>(4);
  expect_table_is_enforced<UnitPhase>(6);
  expect_table_is_enforced<GatherPhase>(3);
}

// The following functions call a model in an unusual order. The next step must be correct.

at::Tensor input() {
  return batch(kDim, 0).requires_grad_();
}

at::Tensor walk_loss(SmallModel& model) {
  return model(input()).square().mean();
}

void expect_correct_step(SmallModel& model) {
  drop_gradients(model);
  set_is_last_backward(model, true);
  walk_loss(model).backward();
  expect_gradients(model, gradients_alone());
}

void train_and_evaluate(ShardedModel& model) {
  for (const bool last : {true, false, true}) {
    set_is_last_backward(model, last);
    walk_loss(model).backward();
    const c10::AutoGradMode no_grad(false);
    walk_loss(model);
  }
}

void run_backward_again(ShardedModel& model) {
  const at::Tensor loss = walk_loss(model);
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
}

void call_a_block_twice(ShardedModel& model) {
  walk_loss(model).backward();
  (*model.blocks[1])((*model.blocks[1])(input())).sum().backward();
}

void run_a_pipeline(ShardedModel& model) {
  set_is_last_backward(model, false);
  const at::Tensor first = walk_loss(model), second = walk_loss(model);
  first.backward();
  set_is_last_backward(model, true);
  second.backward();
}

void fail_in_forward(ShardedModel& model) {
  const at::Tensor earlier = walk_loss(model);
  const auto fails = std::make_shared<bool>(true);
  model.blocks[0]->up->add_forward_hook(
      [fails](nn::ModuleBase&, nn::TensorList) { TESSERA_CHECK(!*fails, "not this time"); });
  EXPECT_ERROR(walk_loss(model), "not this time");
  EXPECT_EQ(model.blocks[0]->attached<Unit>()->phase(), UnitPhase::kForward);
  EXPECT_ERROR(walk_loss(model), "not this time");
  *fails = false;
  earlier.backward();
}

/// Runs a backward that throws when it reaches block 1.
void fail_in_backward(ShardedModel& model) {
  const auto fails = std::make_shared<bool>(true);
  model.blocks[1]->add_forward_hook([fails](nn::ModuleBase&, nn::TensorList outputs) {
    if (*fails) {
      outputs[0]->register_hook([](const at::Tensor&) { fail("not this time"); });
    }
  });
  EXPECT_ERROR(walk_loss(model).backward(), "not this time");
  *fails = false;
}

void free_what_was_gathered_ahead(ShardedModel& model) {
  start_unshard(*model.blocks[0]);
  reshard(*model.blocks[0]);
}

class WithLoss : public SmallModel {
 public:
  WithLoss() : SmallModel(kDim, kHidden, kClasses) {}
  at::Tensor loss(const at::Tensor& x) { return (*this)(x).square().mean(); }
};

void call_forward_from_a_method(const DeviceMesh& mesh) {
  Filled<WithLoss> model;
  shard(model, mesh);
  register_forward_method(model, &WithLoss::loss)(input()).backward();
  expect_gradients(model, gradients_alone());
}

/// forward() runs a backward between two calls of a block. `fails`: whether that backward throws.
struct RunsBackward : nn::Module<RunsBackward> {
  at::Tensor forward(const at::Tensor& x, bool fails) {
    const at::Tensor y = (*block)(x);
    if (fails) {
      y.register_hook([](const at::Tensor&) { fail("not this time"); });
    }
    try {
      y.sum().backward();
    } catch (const Error&) {
      EXPECT_TRUE(fails);
    }
    return (*block)(x);
  }
  nn::Child<Block> block{*this, "block", kDim, 5};
};

void run_backward_in_forward(const DeviceMesh& mesh) {
  Filled<RunsBackward> model;
  shard_units({&*model.block, &model}, mesh);
  for (const bool last : {true, false}) {
    set_is_last_backward(model, last);
    model(input(), /*fails=*/false).sum().backward();
  }
  set_is_last_backward(model, true);
  model(input(), /*fails=*/true);
  model(input(), /*fails=*/false).sum().backward();
}

struct TwoAsOne : nn::Module<TwoAsOne> {
  at::Tensor forward(const at::Tensor& x, bool backward_between) {
    const at::Tensor y = (*first)(x);
    if (backward_between) {
      y.sum().backward({}, /*retain_graph=*/true);
    }
    return (*second)(y);
  }
  nn::Child<nn::Linear> first{*this, "first", kDim, 4}, second{*this, "second", 4, 3};
};

void stop_between_modules(const DeviceMesh& mesh) {
  Filled<TwoAsOne> model;
  fully_shard({&*model.first, &*model.second}, mesh);
  fully_shard(model, mesh);
  bool fails = true;
  model.second->add_forward_pre_hook(
      [&](nn::ModuleBase&, nn::TensorList) { TESSERA_CHECK(!fails, "not this time"); });
  EXPECT_ERROR(model(input(), false), "not this time");
  fails = false;
  model(input(), true).sum().backward();
}

TEST(CallOrder, UnusualCallsAllowACorrectStep) {
  for (const auto body :
       {train_and_evaluate, run_backward_again, call_a_block_twice, run_a_pipeline, fail_in_forward,
        fail_in_backward, free_what_was_gathered_ahead}) {
    RunSharded(2, [&](Rank&, ShardedModel& model) {
      body(model);
      expect_correct_step(model);
    });
  }
  for (const auto body :
       {call_forward_from_a_method, run_backward_in_forward, stop_between_modules}) {
    RunOnMesh({2}, {"dp"}, body);
  }
}

// Without the error, the inner forward would drop gradients that wait to be reduced.
TEST_SHARDED(CallOrder, ForwardWithinBackwardIsRefused, 2) {
  const at::Tensor x = input();
  const at::Tensor loss = model(x).square().mean();
  x.register_hook([&](const at::Tensor&) { walk_loss(model); });
  EXPECT_ERROR(loss.backward(), "the root unit", "within its own backward", "nn::checkpoint");
  expect_correct_step(model);
}

// After a failed backward, this model's next forward runs in a hook of another model's backward.
TEST_SHARDED(CallOrder, FailedIterationRecoversInAnotherModelsBackward, 2) {
  fail_in_backward(model);
  const at::Tensor other = at::ones({1}).requires_grad_() * 2;
  other.register_hook([&](const at::Tensor&) { walk_loss(model); });
  other.sum().backward();
  EXPECT_EQ(model.attached<Unit>()->phase(), UnitPhase::kIdle);
  expect_correct_step(model);
}

TEST_SHARDED(CurrentUnit, IsTheUnitThatFailed, 1) {
  bool in_forward = false, in_backward = false;
  model.blocks[1]->up->add_forward_hook([&](nn::ModuleBase&, nn::TensorList outputs) {
    TORCH_CHECK(!in_forward, "no memory");
    outputs[0]->register_hook([&](const at::Tensor&) { TORCH_CHECK(!in_backward, "no memory"); });
  });
  EXPECT_EQ(current_unit(model), "");
  for (bool* fails : {&in_forward, &in_backward}) {
    *fails = true;
    EXPECT_THROWN(c10::Error, walk_loss(model).backward(), "no memory");
    EXPECT_EQ(current_unit(model), fails == &in_forward ? "the forward of unit 'block1'"
                                                        : "the backward of unit 'block1'");
    *fails = false;
    walk_loss(model).backward();
    EXPECT_EQ(current_unit(model), "");
  }
  const at::Tensor loss = walk_loss(model);
  EXPECT_EQ(current_unit(model), "");
}

// A training step must be able to reuse buffers that a forward in inference mode has allocated.
// With one rank, the unsharded tensors are the shards.
TEST(Iteration, TrainsAfterAForwardInInferenceMode) {
  const std::vector<at::Tensor> expected = gradients_alone();
  for (const int ranks : {1, 3}) {
    RunSharded(ranks, [&](Rank& rank, ShardedModel& model) {
      {
        const c10::InferenceMode inference(true);
        local_loss(model, rank);
        const UnshardScope whole_block(*model.blocks[0]);
        start_unshard(*model.blocks[1]);
      }
      local_loss(model, rank).backward();
      expect_gradients(model, expected);
    });
  }
}

TEST_SHARDED(Iteration, GathersNewValuesAfterAForwardWithoutBackward, 2) {
  EXPECT_NE(local_loss(model, rank).item<double>(), 0.0);
  const c10::AutoGradMode no_grad(false);
  for (const at::Tensor& parameter : parameters_of(model)) {
    local_tensor(parameter).zero_();
  }
  {
    const c10::AutoGradMode grad(true);
    EXPECT_EQ(local_loss(model, rank).item<double>(), 0.0);
  }
  EXPECT_EQ(local_loss(model, rank).item<double>(), 0.0);
  expect_all_sharded(model);
}

TEST(Iteration, FailsOnAllRanksIfOneRankFails) {
  const std::vector<std::string> errors = ErrorsOfRanks(3, [](Rank& rank) {
    ShardedModel model(rank.mesh({3}, {"dp"}));
    model.blocks[1]->add_forward_hook([&](nn::ModuleBase&, nn::TensorList) {
      TESSERA_CHECK(rank.rank() != 1, "rank 1 stops here");
    });
    local_loss(model, rank).backward();
  });
  EXPECT_CONTAINS(errors[1], "rank 1 stops here", "module 'block1'", "unit 'block1'");
  EXPECT_FALSE(errors[0].empty());
  EXPECT_FALSE(errors[2].empty());
}

TEST(FrozenParameters, MayChangeBetweenSteps) {
  const std::vector<at::Tensor> expected = gradients_alone();
  for (const bool reshard : {true, false}) {
    const auto run = [&](Rank& rank, ShardedModel& model) {
      for (const bool frozen : {true, false, true, false}) {
        for (const auto& block : model.blocks) {
          block->up->slot("weight")->persistent().set_requires_grad(!frozen);
        }
        const Sent sent(rank);
        local_loss(model, rank).backward();
        EXPECT_EQ(model.blocks[0]->up->slot("weight")->persistent().grad().defined(), !frozen);
        const std::int64_t block = packed_numel({frozen ? 0 : 5 * 7, 5, 4 * 10, 4});
        const std::int64_t head = packed_numel({2 * 7, 2});
        EXPECT_EQ(sent.of("dp", "reduce_scatter").bytes, 2 * 4 * (3 * block + head));
        if (!frozen) {
          expect_gradients(model, expected);
        }
        drop_gradients(model);
      }
    };
    RunSharded(2, {.reshard_after_forward = reshard}, run);
  }
}

TEST_SHARDED(FrozenBlocks, AreNotGatheredInBackward, 2) {
  nn::freeze(model, {"block[01].**"});
  const Sent sent(rank);
  local_loss(model, rank).backward();
  // Forward gathers the root and three blocks. Backward gathers only the block that is not frozen.
  EXPECT_EQ(sent.calls("dp", "all_gather"), 3 + 1 + 1);
  EXPECT_EQ(sent.calls("dp", "reduce_scatter"), 2);
  // AdamW's state of a parameter with a gradient is two averages and a step counter.
  optim::AdamW optimizer(model, {});
  EXPECT_EQ(optim::named_state(optimizer, model).size(), 3u * (4 + 2));
}

struct Twice : nn::Module<Twice> {
  Twice() {
    for (const char* name : {"weight", "bias"}) {
      frozen->slot(name)->get().set_requires_grad(false);
    }
  }
  at::Tensor forward(const at::Tensor& x) { return (*frozen)((*trained)(x)) - (*frozen)(x); }
  nn::Child<nn::Linear> trained{*this, "trained", kDim, kDim}, frozen{*this, "frozen", kDim, kDim};
};

TEST(FrozenUnit, MayRunWithoutAnInputGradient) {
  const at::Tensor x = batch(kDim, 0);
  Filled<Twice> alone;
  alone(x).square().mean().backward();
  RunOnMesh({2}, {"dp"}, [&](Rank& rank, const DeviceMesh& mesh) {
    Filled<Twice> model;
    shard_units({&*model.trained, &*model.frozen, &model}, mesh);
    const Sent sent(rank);
    model(x.narrow(0, rank.rank() * 6, 6)).square().mean().backward();
    EXPECT_EQ(sent.calls("dp", "reduce_scatter"), 1);
    EXPECT_FALSE(model.frozen->slot("weight")->persistent().grad().defined());
    for (const char* name : {"weight", "bias"}) {
      EXPECT_TRUE(full_grad(*model.trained, name)
                      .allclose(alone.trained->slot(name)->get().grad(), 1e-4, 1e-6));
      EXPECT_TRUE(tessera::is_distributed(model.frozen->slot(name)->get()));
    }
  });
}

TEST_SHARDED(Settings, SwitchesBetweenZero2AndZero3, 2) {
  const auto gathers = [&] {
    const Sent sent(rank);
    local_loss(model, rank).backward();
    return sent.calls("dp", "all_gather");
  };
  EXPECT_EQ(gathers(), 7);
  set_reshard_after_forward(model, false);
  EXPECT_EQ(gathers(), 4);
  set_reshard_after_forward(*model.blocks[0], true);
  EXPECT_EQ(gathers(), 5);
}

TEST_SHARDED(Settings, GathersAheadAfterStartUnshard, 2) {
  const Sent sent(rank);
  start_unshard(*model.blocks[0]);
  const c10::AutoGradMode no_grad(false);
  local_loss(model, rank);
  EXPECT_EQ(sent.calls("dp", "all_gather"), 4);
}

// For these sizes, PyTorch 2.11's FSDP2 gives wrong parameter values after forward.
TEST(PostForwardMesh, SupportsUnevenRows) {
  const at::Tensor x = uniform_values({4, 3}, 5);
  for (const std::int64_t rows : {2, 3, 5, 6, 8}) {
    Filled<nn::Linear> alone(3, rows);
    alone(x).square().sum().backward();
    RunOnMesh({4}, {"dp"}, [&](const DeviceMesh& mesh) {
      Filled<nn::Linear> linear(3, rows);
      fully_shard(linear, mesh, {.reshard_after_forward = true, .post_forward_mesh_size = 2});
      const at::Tensor loss = linear(x).square().sum();
      EXPECT_TRUE(full_tensor(linear.slot("weight")->get()).equal(alone.weight->detach()));
      loss.backward();
      EXPECT_TRUE(full_grad(linear).allclose(alone.weight->grad(), 1e-4, 1e-5));
    });
  }
}

// With one rank, fully_shard() must not copy the parameters. PyTorch 2.11's FSDP2 copies them.
TEST_ON_RANKS(Iteration, CopiesNothingOnOneRank, 1) {
  Filled<nn::Linear> linear(3, 4);
  const void* memory = linear.weight->const_data_ptr();
  fully_shard(linear, rank.mesh({1}, {"dp"}));
  EXPECT_EQ(local_tensor(linear.weight).const_data_ptr(), memory);
  const Sent sent(rank);
  unshard(linear);
  EXPECT_EQ(linear.weight->const_data_ptr(), memory);
  linear(at::ones({1, 3})).sum().backward();
  EXPECT_TRUE(sent.table().empty());
  EXPECT_EQ(local_tensor(linear.weight).const_data_ptr(), memory);
}

}  // namespace tessera::fsdp::state
