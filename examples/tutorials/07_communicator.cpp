// Custom collectives: a communicator that a mesh uses for one of its dimensions.
//   tessera-run --nproc 4 -- build/bin/tutorial_07_communicator

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <iostream>
#include <numeric>

#include "tessera/tessera.hpp"

using namespace tessera;

/// A communicator that sums in double precision and in rank order, so that every back end gives the
/// same bits. It implements two of the five collectives; the base class throws Error for the other
/// three.
class OrderedSums final : public comm::Communicator {
 public:
  explicit OrderedSums(comm::CommunicatorPtr inner)
      : Communicator(inner->rank(), inner->size()), inner_(std::move(inner)) {}

  comm::WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    return inner_->all_gather(output, input);
  }

  comm::WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    TESSERA_CHECK(op == ReduceOp::kSum, name(), ": all_reduce has sum only, not ", to_string(op));
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::Tensor all = at::empty({size(), tensor.numel()}, tensor.options());
    inner_->all_gather(all, tensor)->wait();
    tensor.view({-1}).copy_(all.to(at::kDouble).sum(0));
    return std::make_shared<Done>();
  }

  std::string name() const override { return "ordered_sums"; }

 private:
  /// The comm::Work of a collective that has finished when its call returns.
  struct Done final : comm::Work {
    void wait() override {}
  };

  comm::CommunicatorPtr inner_;
};

void run_rank() {
  const comm::WorldPtr world = comm::world_from_environment();
  std::vector<int> ranks(static_cast<std::size_t>(world->size()));
  std::iota(ranks.begin(), ranks.end(), 0);

  // The inner communicator belongs to the world. It transfers the bytes, checks the arguments and
  // counts the calls.
  const auto group = std::make_shared<OrderedSums>(world->group(ranks, "dp"));
  const DeviceMesh mesh =
      DeviceMesh::from_groups(world, ranks, MeshShape({world->size()}, {"dp"}), {group});

  const at::Tensor term = at::arange(5, c10::kFloat) * (world->rank() + 1);
  // Rank r has (r + 1) * [0, 1, 2, 3, 4]; the distributed tensor is the sum of these terms.
  const DistributedTensor sum = DistributedTensor::from_local(term, mesh, {Partial{}});
  const std::int64_t factor = world->size() * (world->size() + 1) / 2;
  TESSERA_CHECK(at::equal(sum.full_tensor(), at::arange(5, c10::kFloat) * factor),
                "the sum is wrong");
  if (world->rank() == 0) {
    std::cout << "summed by " << mesh.group().name() << " over " << to_string(mesh) << std::endl;
  }
}

int main() {
  return comm::run_main(&run_rank);
}
