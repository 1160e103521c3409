#include "optim/local_shards.h"

#include "optim/parameters.h"
#include "tessera/nn/module.h"
#include "tessera/optim/adamw.h"

namespace tessera::optim {
namespace {

TEST(MergeAdjoining, JoinsNeighboursInMemory) {
  const at::Tensor buffer = at::arange(12, at::kFloat);
  const std::vector<at::Tensor> runs =
      merge_adjoining({buffer.narrow(0, 0, 6).view({2, 3}), buffer.narrow(0, 6, 4), at::ones({2})});
  ASSERT_EQ(runs.size(), 2U);
  EXPECT_EQUAL(runs[0], buffer.narrow(0, 0, 10));
  EXPECT_EQ(runs[0].const_data_ptr(), buffer.const_data_ptr());
  EXPECT_EQUAL(runs[1], at::ones({2}));
}

TEST(MergeAdjoining, KeepsPiecesApartThatHaveAGapOrDifferInOrderOrType) {
  const at::Tensor buffer = at::arange(12, at::kFloat);
  const at::Tensor first = buffer.narrow(0, 0, 4);
  EXPECT_EQ(merge_adjoining({first, buffer.narrow(0, 5, 4)}).size(), 2U);
  EXPECT_EQ(merge_adjoining({buffer.narrow(0, 4, 4), first}).size(), 2U);
  EXPECT_EQ(merge_adjoining({first, buffer.view(at::kInt).narrow(0, 4, 4)}).size(), 2U);
  EXPECT_EQ(
      merge_adjoining({buffer.narrow(0, 0, 6).view({2, 3}).t(), buffer.narrow(0, 6, 4)}).size(),
      2U);
}

TEST(ZerosBeside, BeginAtMultiplesOfSixteenBytes) {
  const std::vector<std::int64_t> sizes{171, 1, 0, 4096, 3, 16};
  for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble}) {
    std::vector<at::Tensor> tensors;
    for (const std::int64_t size : sizes) {
      tensors.push_back(at::empty({size}));
    }
    const std::vector<at::Tensor> zeros =
        zeros_beside(tensors, std::vector<c10::ScalarType>(tensors.size(), dtype));
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(zeros[i].const_data_ptr()) % 16, 0U) << sizes[i];
      EXPECT_EQUAL(zeros[i], at::zeros({sizes[i]}, dtype));
      EXPECT_TRUE(zeros[i].storage().is_alias_of(zeros[0].storage()));
    }
  }
  const std::vector<at::Tensor> multiples =
      zeros_beside({at::empty({32}), at::empty({5})}, {at::kFloat, at::kFloat});
  EXPECT_TRUE(adjoins(multiples[0], multiples[1]));
  const std::vector<at::Tensor> counters = counters_beside(multiples);
  EXPECT_TRUE(adjoins(counters[0], counters[1]));
}

/// A module, because the random bits of bf16 moments depend on the names of parameters.
struct Parameters : nn::Module<Parameters> {
  explicit Parameters(const std::vector<std::int64_t>& sizes) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      register_slot("parameter" + std::to_string(i),
                    normal_values({sizes[i]}, static_cast<std::int64_t>(i)));
    }
  }
};

/// A checkpoint gets the elements of each tensor, without the gaps between tensors.
TEST(AdamW, UpdatesShardsOfAnySizeAsItDoesAlone) {
  for (const c10::ScalarType moments : {at::kFloat, at::kBFloat16}) {
    const std::vector<std::int64_t> sizes{171, 1, 4096};
    const Parameters module(sizes);
    std::vector<nn::SlotPtr> slots;
    for (const auto& [name, slot] : module.named_slots()) {
      slots.push_back(slot);
    }
    AdamW together(slots, {.moment_dtype = moments});
    for (const nn::SlotPtr& slot : slots) {
      set_grad(slot, normal_values(slot->get().sizes().vec(), 9));
    }
    std::vector<at::Tensor> before;
    for (const nn::SlotPtr& slot : slots) {
      before.push_back(slot->get().detach().clone());
    }
    together.step();
    const std::vector<StateTensor> state = together.state();
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const at::Tensor updated = slots[i]->get().detach().clone();
      slots[i]->get().detach().copy_(before[i]);
      set_grad(slots[i], normal_values({sizes[i]}, 9));
      AdamW alone({slots[i]}, {.moment_dtype = moments});
      alone.step();
      EXPECT_EQUAL(slots[i]->get().detach(), updated);
      for (std::size_t j = 0; j < 3; ++j) {
        EXPECT_EQUAL(state[3 * i + j].tensor, alone.state()[j].tensor) << i << " " << j;
      }
    }
  }
}

/// Two parameters one after another in one buffer, as FSDP lays them out.
std::vector<nn::SlotPtr> neighbours(const at::Tensor& buffer) {
  const auto slot = [](const at::Tensor& tensor) {
    return std::make_shared<nn::ParameterSlot>(tensor.detach().requires_grad_(), true);
  };
  return {slot(buffer.narrow(0, 0, 6).view({2, 3})), slot(buffer.narrow(0, 6, 4))};
}

// A step of one of them alone, whose counters then differ; gradients that lie apart and together.
TEST(AdamW, UpdatesNeighboursAsItDoesApart) {
  for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const at::Tensor buffer = normal_values({10}, 0).to(dtype);
    const std::vector<nn::SlotPtr> reference{slot_of(buffer.narrow(0, 0, 6).view({2, 3})),
                                             slot_of(buffer.narrow(0, 6, 4))};
    const std::vector<nn::SlotPtr> slots = neighbours(buffer);
    AdamW optimizer(slots, {.lr = 0.1});
    AdamW expected(reference, {.lr = 0.1});
    for (int step = 0; step < 4; ++step) {
      const at::Tensor grads = normal_values({10}, step + 1).to(dtype);
      for (const auto* list : {&slots, &reference}) {
        const at::Tensor own = grads.clone();
        (*list)[0]->get().mutable_grad() = own.narrow(0, 0, 6).view({2, 3});
        (*list)[1]->get().mutable_grad() = own.narrow(0, 6, 4);
        if (step == 1) {
          (*list)[0]->get().mutable_grad().reset();
        }
        if (step == 2) {
          (*list)[1]->get().mutable_grad() = grads.narrow(0, 6, 4).clone();
        }
      }
      optimizer.step();
      expected.step();
    }
    for (std::size_t i = 0; i < 2; ++i) {
      EXPECT_CLOSE(slots[i]->get().detach(), reference[i]->get().detach(), 1e-6) << i;
    }
  }
}

// Autograd must notice that a parameter changed which a backward still needs.
TEST(AdamW, ChangesTheVersionsOfNeighbours) {
  const std::vector<nn::SlotPtr> slots = neighbours(normal_values({10}, 0));
  const at::Tensor loss = slots[1]->get().square().sum();
  const at::Tensor grads = normal_values({10}, 1);
  slots[0]->get().mutable_grad() = grads.narrow(0, 0, 6).view({2, 3});
  slots[1]->get().mutable_grad() = grads.narrow(0, 6, 4);
  AdamW(slots, {.lr = 0.1}).step();
  EXPECT_THROWN(std::exception, loss.backward(), "modified by an inplace operation");
}

}  // namespace
}  // namespace tessera::optim
