#include "optim/local_shards.h"

#include "optim/parameters.h"
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
