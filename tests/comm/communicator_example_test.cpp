// Tests the example in tessera/comm/communicator.h: a user's own Communicator.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include <memory>

#include "tessera/comm/communicator.h"
#include "tessera/comm/world.h"
#include "tessera/mesh/device_mesh.h"
#include "testing/errors.h"

namespace tessera {
namespace {

class Done final : public comm::Work {
  void wait() override {}
};

class Echo final : public comm::Communicator {
 public:
  explicit Echo(int size) : Communicator(/*rank=*/0, size) {}
  std::string name() const override { return "echo"; }
  comm::WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    output.view({size(), -1}).copy_(input.view({1, -1}));
    return std::make_shared<Done>();
  }
};

TEST(CommunicatorExample, GathersOnAMesh) {
  const auto mesh = DeviceMesh::from_groups(comm::fake_world(0, 2), {0, 1}, MeshShape({2}, {"x"}),
                                            {std::make_shared<Echo>(2)});
  const at::Tensor output = at::empty({6}, at::kLong);
  mesh.group("x").all_gather(output, at::arange(3))->wait();
  EXPECT_TRUE(output.equal(at::arange(3).repeat({2})));
}

TEST(CommunicatorExample, NamesUnimplementedCollectives) {
  Echo group(2);
  EXPECT_ERROR(group.barrier(), "barrier is not implemented by the communicator 'echo'");
}

}  // namespace
}  // namespace tessera
