// Calls of models that take every transition of docs/fsdp_states.md, and recover.

#include <set>

#include "fsdp/state.h"
#include "fsdp/training/training.h"
#include "fsdp/unit.h"
#include "tessera/fsdp/forward_method.h"

namespace tessera::fsdp {
namespace {

using Arrow = std::pair<std::string, std::string>;
using Arrows = std::set<Arrow>;

/// What phases did.
struct Walked {
  Arrows iterations, units, gathers;

  void add(PhaseRecorder& recorder) {
    add(iterations, recorder.changes<IterationPhase>());
    add(units, recorder.changes<UnitPhase>());
    add(gathers, recorder.changes<GatherPhase>());
  }

 private:
  static void add(Arrows& arrows, const std::vector<PhaseRecorder::Change>& changes) {
    for (const PhaseRecorder::Change& change : changes) {
      arrows.emplace(change.from, change.to);
    }
  }
};

template <class P>
Arrows table() {
  Arrows arrows;
  for (const Transition<P>& transition : legal_transitions<P>()) {
    arrows.emplace(to_string(transition.from), to_string(transition.to));
  }
  return arrows;
}

/// What rank 0 of two (or `ranks`) goes through.
Walked walk(const std::function<void(Rank&)>& body, int ranks = 2) {
  Walked walked;
  RunRanks(ranks, [&](Rank& rank) {
    PhaseRecorder recorder;
    body(rank);
    if (rank.rank() == 0) {
      walked.add(recorder);
    }
  });
  return walked;
}

at::Tensor input() {
  return testing::batch(testing::kDim, 0).requires_grad_();
}

at::Tensor walk_loss(SmallModel& model) {
  return model(input()).square().mean();
}

/// After any earlier state.
void expect_a_step_as_ever(SmallModel& model) {
  for (const auto& [name, slot] : model.named_slots()) {
    slot->persistent().mutable_grad().reset();
  }
  set_is_last_backward(model, true);
  walk_loss(model).backward();
  testing::expect_gradients(model, testing::gradients_alone());
}

void train_and_evaluate(Rank& rank) {
  ShardedModel model(rank.mesh({rank.size()}, {"dp"}));
  for (const bool last : {true, false, true}) {
    set_is_last_backward(model, last);
    walk_loss(model).backward();
    const c10::AutoGradMode no_grad(false);
    walk_loss(model);
  }
  expect_a_step_as_ever(model);
}

void run_backward_again(Rank& rank) {
  ShardedModel model(rank.mesh({2}, {"dp"}));
  const at::Tensor loss = walk_loss(model);
  loss.backward({}, /*retain_graph=*/true);
  loss.backward();
  expect_a_step_as_ever(model);
}

/// By itself, outside of the root's forward.
void call_a_block_twice(Rank& rank) {
  ShardedModel model(rank.mesh({2}, {"dp"}));
  walk_loss(model).backward();  // the block knows its root from now on
  const at::Tensor x = input();
  (*model.blocks[1])((*model.blocks[1])(x)).sum().backward();
  expect_a_step_as_ever(model);
}

/// All forwards, then all backwards.
void run_a_pipeline(Rank& rank) {
  ShardedModel model(rank.mesh({2}, {"dp"}));
  set_is_last_backward(model, false);
  const at::Tensor first = walk_loss(model);
  const at::Tensor second = walk_loss(model);
  first.backward();
  set_is_last_backward(model, true);
  second.backward();
  expect_a_step_as_ever(model);
}

/// Fails in the forward of its first block, once.
void fail_in_forward(Rank& rank) {
  ShardedModel model(rank.mesh({2}, {"dp"}));
  const at::Tensor earlier = walk_loss(model);
  bool fails = true;
  model.blocks[0]->up->add_forward_hook(
      [&](nn::ModuleBase&, nn::TensorList) { TESSERA_CHECK(!fails, "not this time"); });
  EXPECT_ERROR(walk_loss(model), "not this time");
  EXPECT_EQ(model.blocks[0]->attached<Unit>()->phase(), UnitPhase::kForward);
  EXPECT_ERROR(walk_loss(model), "not this time");  // the root's begins again
  fails = false;
  earlier.backward();  // of a graph from before
  expect_a_step_as_ever(model);
}

/// Fails once, when backward has come to the last block.
void run_a_backward_that_fails(SmallModel& model) {
  const auto fails = std::make_shared<bool>(true);
  model.blocks[1]->add_forward_hook([fails](nn::ModuleBase&, nn::TensorList outputs) {
    if (*fails) {
      outputs[0]->register_hook([](const at::Tensor&) { fail("not this time"); });
    }
  });
  EXPECT_ERROR(walk_loss(model).backward(), "not this time");
  *fails = false;
}

void fail_in_backward(Rank& rank) {
  ShardedModel model(rank.mesh({2}, {"dp"}));
  run_a_backward_that_fails(model);
  expect_a_step_as_ever(model);
}

void free_what_was_gathered_ahead(Rank& rank) {
  ShardedModel model(rank.mesh({2}, {"dp"}));
  start_unshard(*model.blocks[0]);
  reshard(*model.blocks[0]);
  expect_a_step_as_ever(model);
}

/// A method calls forward.
class WithLoss : public SmallModel {
 public:
  WithLoss() : SmallModel(testing::kDim, testing::kHidden, testing::kClasses) {}
  at::Tensor loss(const at::Tensor& x) { return (*this)(x).square().mean(); }
};

void call_forward_from_a_method(Rank& rank) {
  Filled<WithLoss> model;
  testing::shard(model, rank.mesh({2}, {"dp"}));
  register_forward_method(model, &WithLoss::loss)(input()).backward();
  testing::expect_gradients(model, testing::gradients_alone());
}

/// A block that runs twice, with a backward in between, which may fail.
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

  nn::Child<testing::Block> block{*this, "block", testing::kDim, 5};
};

void run_backward_in_forward(Rank& rank) {
  Filled<RunsBackward> model;
  fully_shard(*model.block, rank.mesh({2}, {"dp"}));
  fully_shard(model, rank.mesh({2}, {"dp"}));
  for (const bool last : {true, false}) {
    set_is_last_backward(model, last);
    model(input(), /*fails=*/false).sum().backward();
  }
  set_is_last_backward(model, true);
  model(input(), /*fails=*/true);
  model(input(), /*fails=*/false).sum().backward();
}

/// Two modules that are one unit.
struct TwoAsOne : nn::Module<TwoAsOne> {
  at::Tensor forward(const at::Tensor& x, bool backward_between) {
    const at::Tensor y = (*first)(x);
    if (backward_between) {
      y.sum().backward({}, /*retain_graph=*/true);
    }
    return (*second)(y);
  }

  nn::Child<nn::Linear> first{*this, "first", testing::kDim, 4}, second{*this, "second", 4, 3};
};

void stop_between_modules(Rank& rank) {
  Filled<TwoAsOne> model;
  fully_shard({&*model.first, &*model.second}, rank.mesh({2}, {"dp"}));
  fully_shard(model, rank.mesh({2}, {"dp"}));
  bool fails = true;
  model.second->add_forward_pre_hook(
      [&](nn::ModuleBase&, nn::TensorList) { TESSERA_CHECK(!fails, "not this time"); });
  EXPECT_ERROR(model(input(), false), "not this time");
  fails = false;
  model(input(), true).sum().backward();
}

TEST(PhaseWalk, TakesEveryTransition) {
  Walked all;
  const auto add = [&](const Walked& walked) {
    all.iterations.insert(walked.iterations.begin(), walked.iterations.end());
    all.units.insert(walked.units.begin(), walked.units.end());
    all.gathers.insert(walked.gathers.begin(), walked.gathers.end());
  };
  add(walk(train_and_evaluate, 1));
  for (const auto body :
       {train_and_evaluate, run_backward_again, call_a_block_twice, run_a_pipeline, fail_in_forward,
        fail_in_backward, free_what_was_gathered_ahead, call_forward_from_a_method,
        run_backward_in_forward, stop_between_modules}) {
    add(walk(body));
  }
  EXPECT_EQ(all.iterations, table<IterationPhase>());
  EXPECT_EQ(all.units, table<UnitPhase>());
  EXPECT_EQ(all.gathers, table<GatherPhase>());
}

TEST(PhaseWalk, AStepFollowsTheFirstColumnOfTheDocumentedTable) {
  RunSharded(2, [](Rank&, ShardedModel& model) {
    walk_loss(model).backward();
    PhaseRecorder recorder;
    walk_loss(model).backward();
    std::string phases;
    for (const PhaseRecorder::Change& change : recorder.changes<UnitPhase>()) {
      phases += change.whose == "unit 'block1'" ? change.to + " " : "";
    }
    EXPECT_EQ(phases, "kForward kForwardRecorded kAwaitingBackward kBackward kIdle ");
    phases.clear();
    for (const PhaseRecorder::Change& change : recorder.changes<IterationPhase>()) {
      EXPECT_EQ(change.whose, "the iteration of the root unit");
      phases += change.to + " ";
    }
    EXPECT_EQ(phases, "kForward kAwaitingBackward kBackward kIdle ");
    phases.clear();
    for (const PhaseRecorder::Change& change : recorder.changes<GatherPhase>()) {
      phases += change.whose == "unit 'block1'" ? change.to + " " : "";
    }
    EXPECT_EQ(phases, "kGathering kUnsharded kSharded kGathering kUnsharded kSharded ");
  });
}

// It would lose the gradients on their way.
TEST(Phase, AForwardWithinBackwardIsRefused) {
  RunSharded(2, [](Rank&, ShardedModel& model) {
    const at::Tensor x = input();
    const at::Tensor loss = model(x).square().mean();
    x.register_hook([&](const at::Tensor&) { walk_loss(model); });
    EXPECT_ERROR(loss.backward(), "the root unit", "within its own backward", "nn::checkpoint");
    expect_a_step_as_ever(model);
  });
}

// The backward that runs then is not the one that failed.
TEST(Phase, AFailedIterationRecoversWithinAnotherModelsBackward) {
  RunSharded(2, [](Rank&, ShardedModel& model) {
    run_a_backward_that_fails(model);
    const at::Tensor other = at::ones({1}).requires_grad_() * 2;
    other.register_hook([&](const at::Tensor&) { walk_loss(model); });
    other.sum().backward();
    EXPECT_EQ(model.attached<Unit>()->phase(), UnitPhase::kIdle);
    expect_a_step_as_ever(model);
  });
}

}  // namespace
}  // namespace tessera::fsdp
