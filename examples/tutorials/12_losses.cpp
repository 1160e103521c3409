// Losses that are not a plain mean, on ranks with different numbers of rows: a contrastive loss
// over the features of all ranks, a mean over uneven rows, and a penalty on the weights. The
// gradients are compared with those of one rank.
//   tessera-run --nproc 2 -- build/bin/tutorial_12_losses

#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/sin.h>

#include <iostream>

#include "expect_gradients.h"
#include "tessera/tessera.hpp"

using namespace tessera;

constexpr std::int64_t kRows = 7, kDim = 6;  // the ranks split the kRows rows as torch.chunk does

at::Tensor values(std::int64_t rows, double phase) {
  return at::sin(at::arange(rows * kDim, at::kFloat) + phase).view({rows, kDim});
}

/// The contrastive loss of Radford et al. 2021: row i of `a` must match row i of `b`.
at::Tensor contrastive(const at::Tensor& a, const at::Tensor& b) {
  return at::cross_entropy_loss(a.mm(b.t()), at::arange(a.size(0)));
}

/// Two views of the same rows: on the mesh, this rank's rows; in the one-rank run, all rows.
struct Views {
  at::Tensor a, b;
};

// [gathered]
/// Gathers the features of all ranks' rows on every rank. The gradient of the gathered features is
/// Partial: each rank contributes a term of a sum. Together with FSDP's mean, the gradients equal
/// those of one rank.
at::Tensor of_all_ranks(const at::Tensor& features, const DeviceMesh& mesh) {
  return DistributedTensor::from_local(features, mesh, {Shard{0}}).full_tensor({{Partial{}}});
}
// [gathered]

// [losses]
at::Tensor loss_of(nn::Linear& model, const Views& rows, const DeviceMesh& mesh) {
  // One forward call for both views, because FSDP gathers the parameters once per call.
  const at::Tensor features = model(at::cat({rows.a, rows.b}));
  const auto views = features.chunk(2);
  // Every rank computes the whole contrastive loss of the gathered features.
  const at::Tensor matched =
      contrastive(of_all_ranks(views[0], mesh), of_all_ranks(views[1], mesh));
  // The mean over all rows if ranks have different numbers of rows: each rank divides its sum by
  // the average number of rows per rank, and FSDP takes the mean over the ranks.
  const double rows_per_rank = static_cast<double>(kRows) / static_cast<double>(mesh.size());
  const at::Tensor size = views[0].square().sum(1).sum() / rows_per_rank;
  // Outside of forward, parameters are distributed tensors. The loss is plain, so the penalty is
  // converted to a plain tensor.
  const DistributedTensor penalty(model.weight->square().sum());
  return matched + 0.1 * size + 0.01 * penalty.full_tensor();
}
// [losses]

at::Tensor loss_of_one_rank(nn::Linear& model, const Views& rows) {
  const auto views = model(at::cat({rows.a, rows.b})).chunk(2);
  return contrastive(views[0], views[1]) + 0.1 * views[0].square().sum(1).mean() +
         0.01 * model.weight->square().sum();
}

void run_rank() {
  const comm::WorldPtr world = comm::world_from_environment();
  const DeviceMesh mesh = init_device_mesh(world, {world->size()}, {"dp"});
  nn::Linear whole(kDim, 5), model(kDim, 5);
  nn::init_weights(whole, /*seed=*/0);
  nn::init_weights(model, /*seed=*/0);
  fsdp::fully_shard(model, mesh);

  const Views all{values(kRows, 0), values(kRows, 0.3)};
  const auto mine = [&](const at::Tensor& rows) {
    return distribute_tensor(rows, mesh, {Shard{0}}).to_local();
  };
  loss_of_one_rank(whole, all).backward();
  loss_of(model, {mine(all.a), mine(all.b)}, mesh).backward();

  expect_gradients(model, whole);
  if (world->rank() == 0) {
    std::cout << "every gradient is as one rank computes it" << std::endl;
  }
}

int main() {
  return comm::run_main(&run_rank);
}
