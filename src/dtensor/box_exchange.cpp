#include "box_exchange.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

#include "below_autograd.h"
#include "redistribute_steps.h"
#include "tessera/comm/communicator.h"
#include "tessera/dtensor/in_order.h"

namespace tessera::detail {
namespace {

std::vector<int> all_dims(const DeviceMesh& mesh) {
  std::vector<int> dims(static_cast<std::size_t>(mesh.ndim()));
  std::iota(dims.begin(), dims.end(), 0);
  return dims;
}

/// The block of `tensor` at `offset`; a tensor without dimensions is its own block.
at::Tensor block(at::Tensor tensor, const std::vector<std::int64_t>& offset,
                 const std::vector<std::int64_t>& sizes) {
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    tensor = tensor.narrow(static_cast<std::int64_t>(dim), offset[dim], sizes[dim]);
  }
  return tensor;
}

}  // namespace

std::vector<HeldPart> held_parts(const DeviceMesh& mesh, LayoutPtr layout, c10::IntArrayRef sizes) {
  std::vector<HeldPart> parts;
  for (int rank = 0; rank < mesh.size(); ++rank) {
    auto boxes = owned_boxes(*layout, sizes, mesh.shape().coordinate(rank));
    if (boxes.empty()) continue;
    const auto known = std::find_if(parts.begin(), parts.end(),
                                    [&](const auto& part) { return part.boxes == boxes; });
    if (known != parts.end()) {
      known->ranks.push_back(rank);
    } else {
      parts.push_back({std::move(boxes), {rank}});
    }
  }
  return parts;
}

int BoxExchange::sender_of(const HeldPart& part, int receiver) {
  if (std::find(part.ranks.begin(), part.ranks.end(), receiver) != part.ranks.end()) {
    return receiver;
  }
  return part.ranks[static_cast<std::size_t>(receiver) % part.ranks.size()];
}

std::vector<BoxExchange::Piece> BoxExchange::pieces(int sender, int receiver) const {
  std::vector<Piece> result;
  const auto intersect = [&](const Box& held, const Box& wanted) {
    Piece piece;
    for (std::size_t dim = 0; dim < held.sizes.size(); ++dim) {
      const auto a = held.global_offset[dim], b = wanted.global_offset[dim];
      const auto begin = std::max(a, b);
      const auto end = std::min(a + held.sizes[dim], b + wanted.sizes[dim]);
      if (begin >= end) return;
      piece.from.push_back(held.local_offset[dim] + begin - a);
      piece.to.push_back(wanted.local_offset[dim] + begin - b);
      piece.sizes.push_back(end - begin);
    }
    result.push_back(std::move(piece));
  };
  for (const auto& part : parts_) {
    if (sender_of(part, receiver) != sender) continue;
    for (const auto& held : part.boxes) {
      for (const auto& wanted : wanted_[static_cast<std::size_t>(receiver)]) {
        intersect(held, wanted);
      }
    }
  }
  return result;
}

bool BoxExchange::moves() const {
  const auto ranks = static_cast<int>(wanted_.size());
  for (int receiver = 0; receiver < ranks; ++receiver) {
    for (int sender = 0; sender < ranks; ++sender) {
      if (sender != receiver && !pieces(sender, receiver).empty()) return true;
    }
  }
  return false;
}

at::Tensor BoxExchange::run(const at::Tensor& local, c10::IntArrayRef sizes,
                            const DeviceMesh& mesh) const {
  BelowAutograd guard;
  auto result = at::empty(sizes, local.options());
  if (local.is_meta()) return result;
  const auto self = static_cast<int>(mesh.shape().index(mesh.coordinate()));
  const auto source = local.resolve_conj().resolve_neg();
  for (const auto& piece : pieces(self, self)) {
    block(result, piece.to, piece.sizes).copy_(block(source, piece.from, piece.sizes));
  }
  if (!moves()) return result;

  const std::int64_t parts = local.is_complex() ? 2 : 1;
  std::vector<at::Tensor> sent{at::empty({0}, local.options())};
  std::vector<std::int64_t> send_counts, receive_counts;
  for (int rank = 0; rank < mesh.size(); ++rank) {
    std::int64_t sends = 0, receives = 0;
    for (const auto& piece : rank == self ? std::vector<Piece>{} : pieces(self, rank)) {
      sent.push_back(block(source, piece.from, piece.sizes).reshape({-1}));
      sends += sent.back().numel();
    }
    for (const auto& piece : rank == self ? std::vector<Piece>{} : pieces(rank, self)) {
      receives += c10::multiply_integers(piece.sizes);
    }
    send_counts.push_back(sends * parts);
    receive_counts.push_back(receives * parts);
  }
  const auto input = at::cat(sent);
  const auto total = std::accumulate(receive_counts.begin(), receive_counts.end(), std::int64_t{0});
  const auto output = at::empty({total / parts}, local.options());
  in_order(mesh.group(all_dims(mesh)))
      .all_to_all(reals(output), reals(input), receive_counts, send_counts)
      ->wait();
  std::int64_t offset = 0;
  for (int rank = 0; rank < mesh.size(); ++rank) {
    if (rank == self) continue;
    for (const auto& piece : pieces(rank, self)) {
      const auto numel = c10::multiply_integers(piece.sizes);
      block(result, piece.to, piece.sizes).copy_(output.narrow(0, offset, numel).view(piece.sizes));
      offset += numel;
    }
  }
  return result;
}

}  // namespace tessera::detail
