// See matrix_exchange.h. Everything that does not depend on values (owners, parts, boxes) is
// computed in the constructor, and kept by Muon as long as the matrices are the same.
#include "muon/matrix_exchange.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "tessera/comm/communicator.h"
#include "tessera/dtensor/detail/transfers.h"

namespace tessera::optim {
namespace {

/// Multiply-adds of one Newton-Schulz step, up to a constant.
double work_of(const SpreadMatrix& matrix) {
  const auto rows = static_cast<double>(matrix.rows);
  const auto columns = static_cast<double>(matrix.columns);
  return rows * columns * std::min(rows, columns);
}

/// Greedy: the matrix with the most work first, each to the rank with the least work so far.
/// Stable sorting and the first of equal loads: every rank must deal alike.
std::vector<std::int64_t> deal(const std::vector<SpreadMatrix>& matrices, std::int64_t ranks) {
  std::vector<std::size_t> order(matrices.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) {
    return work_of(matrices[a]) > work_of(matrices[b]);
  });
  std::vector<double> loads(static_cast<std::size_t>(ranks), 0.0);
  std::vector<std::int64_t> owners(matrices.size());
  for (const std::size_t matrix : order) {
    const auto least = std::ranges::min_element(loads);
    *least += work_of(matrices[matrix]);
    owners[matrix] = least - loads.begin();
  }
  return owners;
}

/// The place of a box in a matrix, or in the part of it that a rank holds.
at::Tensor block(const at::Tensor& tensor, const std::vector<std::int64_t>& offset,
                 const std::vector<std::int64_t>& sizes) {
  return tensor.narrow(0, offset[0], sizes[0]).narrow(1, offset[1], sizes[1]);
}

}  // namespace

MatrixExchange::MatrixExchange(const DeviceMesh& mesh, std::vector<SpreadMatrix> matrices)
    : mesh_(mesh),
      matrices_(std::move(matrices)),
      owners_(deal(matrices_, mesh.size())),
      self_(mesh.shape().index(mesh.coordinate())) {
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    sends_.push_back(sends(i, self_));
    // Other ranks' parts are needed only for what this rank puts together.
    if (owners_[i] != self_) {
      continue;
    }
    owned_.push_back(i);
    std::vector<RankShard>& parts = parts_.emplace_back();
    for (std::int64_t rank = 0; rank < mesh.size(); ++rank) {
      parts.push_back(part(i, rank));
    }
  }
}

/// What `rank`, an index in the mesh, holds of a matrix: a pure function of the layout.
MatrixExchange::RankShard MatrixExchange::part(std::size_t matrix, std::int64_t rank) const {
  const SpreadMatrix& m = matrices_[matrix];
  const std::array<std::int64_t, 2> sizes{m.rows, m.columns};
  const std::vector<std::int64_t> at = mesh_.shape().coordinate(rank);
  return {local_sizes(*m.layout, sizes, at), owned_boxes(*m.layout, sizes, at),
          local_numel(*m.layout, sizes, at), sends(matrix, rank)};
}

/// Whether the owner takes this rank's part. Along a dimension that replicates, it takes its own
/// replica's copy.
bool MatrixExchange::sends(std::size_t matrix, std::int64_t rank) const {
  const std::vector<std::int64_t> from = mesh_.shape().coordinate(rank);
  const std::vector<std::int64_t> to = mesh_.shape().coordinate(owners_[matrix]);
  for (int d = 0; d < mesh_.ndim(); ++d) {
    const auto i = static_cast<std::size_t>(d);
    if (matrices_[matrix].layout->sharded_dim(d) < 0 && from[i] != to[i]) {
      return false;
    }
  }
  return true;
}

/// Sends each rank its tensors, flattened, and returns what comes, rank after rank: `from_ranks`
/// elements of each.
at::Tensor MatrixExchange::exchange(const std::vector<std::vector<at::Tensor>>& to_ranks,
                                    const std::vector<std::int64_t>& from_ranks,
                                    const at::Tensor& like) const {
  // An empty one first: cat() takes no empty list, and a rank may have nothing to send.
  std::vector<at::Tensor> pieces{at::empty({0}, like.options())};
  std::vector<std::int64_t> counts;
  for (const std::vector<at::Tensor>& tensors : to_ranks) {
    counts.push_back(0);
    for (const at::Tensor& tensor : tensors) {
      counts.back() += tensor.numel();
      pieces.push_back(tensor.reshape({-1}));
    }
  }
  const at::Tensor input = at::cat(pieces);
  const std::int64_t total = std::accumulate(from_ranks.begin(), from_ranks.end(), std::int64_t{0});
  at::Tensor output = at::empty({total}, like.options());
  flush_pending_transfers(mesh_.group_of_all_ranks())
      .all_to_all(output, input, from_ranks, counts)
      ->wait();
  return output;
}

/// The matrices that this rank owns, unsharded.
std::vector<at::Tensor> MatrixExchange::gather(const std::vector<at::Tensor>& locals) const {
  const auto ranks = static_cast<std::size_t>(mesh_.size());
  std::vector<std::vector<at::Tensor>> to_ranks(ranks);
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    if (sends_[i]) {
      to_ranks[static_cast<std::size_t>(owners_[i])].push_back(locals[i]);
    }
  }
  std::vector<std::int64_t> from_ranks(ranks, 0);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (std::size_t k = 0; k < owned_.size(); ++k) {
      if (parts_[k][rank].sent) {
        from_ranks[rank] += parts_[k][rank].numel;
      }
    }
  }
  const at::Tensor received = exchange(to_ranks, from_ranks, locals.front());
  std::vector<at::Tensor> wholes;
  for (const std::size_t i : owned_) {
    wholes.push_back(at::empty({matrices_[i].rows, matrices_[i].columns}, received.options()));
  }
  // Rank after rank, and of each rank matrix after matrix: the order in which the sender has put
  // them together.
  std::int64_t offset = 0;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (std::size_t k = 0; k < owned_.size(); ++k) {
      const RankShard& part = parts_[k][rank];
      if (!part.sent) {
        continue;
      }
      const at::Tensor piece = received.narrow(0, offset, part.numel).view(part.sizes);
      for (const Box& box : part.boxes) {
        block(wholes[k], box.global_offset, box.sizes)
            .copy_(block(piece, box.local_offset, box.sizes));
      }
      offset += part.numel;
    }
  }
  return wholes;
}

/// This rank's part of every matrix, sent by the owners.
std::vector<at::Tensor> MatrixExchange::scatter(const std::vector<at::Tensor>& wholes,
                                                const std::vector<at::Tensor>& locals) const {
  const auto ranks = static_cast<std::size_t>(mesh_.size());
  // Every rank gets its part, replicas included, whichever rank sent it to the owner.
  std::vector<std::vector<at::Tensor>> to_ranks(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    for (std::size_t k = 0; k < owned_.size(); ++k) {
      const RankShard& part = parts_[k][rank];
      at::Tensor piece = at::empty(part.sizes, wholes[k].options());
      for (const Box& box : part.boxes) {
        block(piece, box.local_offset, box.sizes)
            .copy_(block(wholes[k], box.global_offset, box.sizes));
      }
      to_ranks[rank].push_back(std::move(piece));
    }
  }
  std::vector<std::int64_t> from_ranks(ranks, 0);
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    from_ranks[static_cast<std::size_t>(owners_[i])] += locals[i].numel();
  }
  const at::Tensor received = exchange(to_ranks, from_ranks, locals.front());
  std::vector<std::int64_t> offsets(ranks, 0);
  // Where the data of each owner begin; each cursor then moves matrix by matrix.
  std::exclusive_scan(from_ranks.begin(), from_ranks.end(), offsets.begin(), std::int64_t{0});
  std::vector<at::Tensor> parts;
  for (std::size_t i = 0; i < matrices_.size(); ++i) {
    std::int64_t& offset = offsets[static_cast<std::size_t>(owners_[i])];
    parts.push_back(received.narrow(0, offset, locals[i].numel()).view(locals[i].sizes()));
    offset += locals[i].numel();
  }
  return parts;
}

std::vector<at::Tensor> MatrixExchange::run(const std::vector<at::Tensor>& locals,
                                            const Work& work) const {
  std::vector<at::Tensor> wholes = gather(locals);
  for (std::size_t k = 0; k < owned_.size(); ++k) {
    wholes[k] = work(owned_[k], wholes[k]).to(locals.front().scalar_type());
  }
  return scatter(wholes, locals);
}

}  // namespace tessera::optim
