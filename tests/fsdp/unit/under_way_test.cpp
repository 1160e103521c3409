// An error of libtorch's, as out of memory, names the unit in which it was thrown.
#include <c10/util/Exception.h>

#include "tessera/fsdp/fully_shard.h"
#include "tessera/nn/child.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/module.h"
#include "testing/distributed.h"
#include "testing/module_values.h"

namespace tessera::fsdp {
namespace {

/// Throws at a chosen place.
struct Faulty : nn::Module<Faulty> {
  at::Tensor forward(const at::Tensor& x) {
    TORCH_CHECK(!in_forward, "no memory");
    const at::Tensor y = (*linear)(x);
    y.register_hook([this](const at::Tensor&) { TORCH_CHECK(!in_backward, "no memory"); });
    return at::relu(y);
  }

  nn::Child<nn::Linear> linear{*this, "linear", 3, 3};
  bool in_forward = false;
  bool in_backward = false;
};

/// Three units one after another, in a root.
class Three : public nn::Module<Three> {
 public:
  explicit Three(const DeviceMesh& mesh) {
    for (const char* name : {"a", "b", "c"}) {
      units.push_back(register_module(name, std::make_shared<Faulty>()));
      testing::fill(*units.back());
      fully_shard(*units.back(), mesh);
    }
    fully_shard(*this, mesh);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& unit : units) {
      x = (*unit)(x);
    }
    return x;
  }
  void step() { (*this)(at::ones({2, 3})).sum().backward(); }

  std::vector<std::shared_ptr<Faulty>> units;
};

TEST(UnderWay, NamesTheUnitWhoseForwardFailed) {
  RunRanks(1, [](Rank& rank) {
    Three model(rank.mesh({1}, {"dp"}));
    EXPECT_EQ(current_unit(model), "");
    model.units[1]->in_forward = true;
    EXPECT_THROWN(c10::Error, model.step(), "no memory");
    EXPECT_EQ(current_unit(model), "the forward of unit 'b'");
    model.units[1]->in_forward = false;
    model.step();
    EXPECT_EQ(current_unit(model), "");
  });
}

TEST(UnderWay, NamesTheUnitWhoseBackwardFailed) {
  RunRanks(1, [](Rank& rank) {
    Three model(rank.mesh({1}, {"dp"}));
    model.units[1]->in_backward = true;
    EXPECT_THROWN(c10::Error, model.step(), "no memory");
    EXPECT_EQ(current_unit(model), "the backward of unit 'b'");
  });
}

TEST(UnderWay, NamesNoUnitBetweenForwardAndBackward) {
  RunRanks(1, [](Rank& rank) {
    Three model(rank.mesh({1}, {"dp"}));
    const at::Tensor y = model(at::ones({2, 3}));
    EXPECT_EQ(current_unit(model), "");
  });
}

}  // namespace
}  // namespace tessera::fsdp
