// The exchange of spatial_convolution.cpp along one dimension. Shards and windows are two lists of
// ranges that every rank knows, so that each computes what all others send. Backward swaps the two
// lists.

#include "forms/halo.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "redistribute/redistribute_steps.h"
#include "tessera/core/layout_math.h"
#include "tessera/dtensor/detail/flush_pending_transfers.h"

namespace tessera::detail {
namespace {

/// Positions `piece` of a tensor that has positions `origin`.
at::Tensor narrow(const at::Tensor& tensor, std::int64_t dim, const Range& origin,
                  const Range& piece) {
  return tensor.narrow(dim, piece.begin - origin.begin, piece.size());
}

std::vector<std::int64_t> sizes_with(const at::Tensor& tensor, std::int64_t dim,
                                     std::int64_t size) {
  auto sizes = tensor.sizes().vec();
  sizes[static_cast<std::size_t>(dim)] = size;
  return sizes;
}

/// One rank's side of an exchange: what it sends to, and gets from, each other rank.
class Side {
 public:
  Side(const at::Tensor& local, std::int64_t dim, const Ranges& from, const Ranges& to,
       std::size_t self)
      : local_(local), dim_(dim), from_(from), to_(to), self_(self) {}

  /// What the other ranks send to this one, flat, in the order of the ranks. Collective.
  at::Tensor receive(comm::Communicator& group) const {
    // With an empty piece in front: at::cat needs at least one.
    std::vector<at::Tensor> sent{at::empty({0}, local_.options())};
    std::vector<std::int64_t> send_counts, receive_counts;
    // Elements of one position. They are floating-point numbers (is_valid), which a communicator
    // takes.
    const auto row = c10::multiply_integers(sizes_with(local_, dim_, 1));
    for (std::size_t rank = 0; rank < from_.size(); ++rank) {
      const auto piece = rank == self_ ? Range{} : overlap(from_[self_], to_[rank]);
      if (piece.size() > 0) {
        sent.push_back(flat(narrow(local_, dim_, from_[self_], piece)));
      }
      send_counts.push_back(piece.size() * row);
      receive_counts.push_back(rank == self_ ? 0 : gets(rank).size() * row);
    }
    const auto total =
        std::accumulate(receive_counts.begin(), receive_counts.end(), std::int64_t{0});
    auto received = at::empty({total}, local_.options());
    flush_pending_transfers(group)
        .all_to_all(received, at::cat(sent), receive_counts, send_counts)
        ->wait();
    return received;
  }

  /// Adds what was received to `result`, in the order of the ranks: every run gives the same bits.
  void add(const at::Tensor& received, const at::Tensor& result) const {
    std::int64_t offset = 0;
    for (std::size_t rank = 0; rank < from_.size(); ++rank) {
      const auto piece = gets(rank);
      if (piece.size() == 0) {
        continue;
      }
      const auto target = narrow(result, dim_, to_[self_], piece);
      if (rank == self_) {
        target.add_(narrow(local_, dim_, from_[self_], piece));
      } else {
        target.add_(received.narrow(0, offset, target.numel()).view(target.sizes()));
        offset += target.numel();
      }
    }
  }

 private:
  Range gets(std::size_t rank) const { return overlap(from_[rank], to_[self_]); }

  const at::Tensor& local_;
  std::int64_t dim_;
  const Ranges& from_;
  const Ranges& to_;
  std::size_t self_;
};

}  // namespace

Ranges shard_ranges(const Layout& layout, int tensor_dim, std::int64_t size) {
  Ranges parts{{0, size}};
  // Each mesh dimension cuts what the one before it left; later ones go faster, as in the group.
  for (const int m : layout.mesh_dims_of(tensor_dim)) {
    const auto chunks = layout.mesh_sizes()[static_cast<std::size_t>(m)];
    Ranges finer;
    for (const auto& part : parts) {
      for (std::int64_t i = 0; i < chunks; ++i) {
        const auto begin = part.begin + chunk_offset(part.size(), chunks, i);
        finer.push_back({begin, begin + chunk_size(part.size(), chunks, i)});
      }
    }
    parts = std::move(finer);
  }
  return parts;
}

std::int64_t most_sent(const Ranges& from, const Ranges& to) {
  std::int64_t most = 0;
  for (std::size_t sender = 0; sender < from.size(); ++sender) {
    std::int64_t sent = 0;
    for (std::size_t rank = 0; rank < to.size(); ++rank) {
      if (rank != sender) {
        sent += overlap(from[sender], to[rank]).size();
      }
    }
    most = std::max(most, sent);
  }
  return most;
}

at::Tensor exchange_along(const at::Tensor& local, std::int64_t dim, const Ranges& from,
                          const Ranges& to, comm::Communicator& group) {
  const auto self = static_cast<std::size_t>(group.rank());
  const auto sizes = sizes_with(local, dim, to[self].size());
  if (local.is_meta()) {
    return at::empty(sizes, local.options());
  }
  // Over all ranks: either all take part or none.
  const bool moves = most_sent(from, to) > 0;
  if (!moves && from[self] == to[self]) {
    return local;
  }
  const Side side(local, dim, from, to, self);
  const auto received = moves ? side.receive(group) : at::Tensor();
  // Zeros, for a position beyond the ends of the input, its padding, is held by nobody.
  auto result = at::zeros(sizes, local.options());
  side.add(received, result);
  return result;
}

}  // namespace tessera::detail
