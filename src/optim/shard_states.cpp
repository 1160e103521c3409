#include "shard_states.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::optim {
namespace {

struct Piece {
  c10::IntArrayRef sizes;
  c10::Device device;
  c10::ScalarType dtype;
};

struct Buffer {
  c10::Device device;
  c10::ScalarType dtype;
  std::int64_t numel = 0;
  at::Tensor memory = {};
};

std::vector<at::Tensor> zeros(const std::vector<Piece>& pieces) {
  std::vector<Buffer> buffers;
  const auto buffer_of = [&](const Piece& piece) -> Buffer& {
    const auto found = std::ranges::find_if(buffers, [&](const Buffer& buffer) {
      return buffer.device == piece.device && buffer.dtype == piece.dtype;
    });
    return found != buffers.end() ? *found
                                  : buffers.emplace_back(Buffer{piece.device, piece.dtype});
  };
  for (const Piece& piece : pieces) {
    buffer_of(piece).numel += c10::multiply_integers(piece.sizes);
  }
  for (Buffer& buffer : buffers) {
    buffer.memory = at::zeros({buffer.numel}, at::dtype(buffer.dtype).device(buffer.device));
    buffer.numel = 0;
  }
  std::vector<at::Tensor> tensors;
  for (const Piece& piece : pieces) {
    Buffer& buffer = buffer_of(piece);
    const std::int64_t numel = c10::multiply_integers(piece.sizes);
    tensors.push_back(buffer.memory.narrow(0, buffer.numel, numel).view(piece.sizes));
    buffer.numel += numel;
  }
  return tensors;
}

}  // namespace

c10::ScalarType update_type(c10::ScalarType dtype) {
  return at::toOpMathType(dtype);
}

std::vector<at::Tensor> zeros_beside(const std::vector<at::Tensor>& tensors) {
  std::vector<Piece> pieces;
  for (const at::Tensor& tensor : tensors) {
    pieces.push_back({tensor.sizes(), tensor.device(), update_type(tensor.scalar_type())});
  }
  return zeros(pieces);
}

std::vector<at::Tensor> counters_beside(const std::vector<at::Tensor>& tensors) {
  std::vector<Piece> pieces;
  for (const at::Tensor& tensor : tensors) {
    pieces.push_back({{}, tensor.device(), c10::ScalarType::Float});
  }
  return zeros(pieces);
}

at::Tensor lying_as(const at::Tensor& parameter, const at::Tensor& state) {
  if (!tessera::is_distributed(parameter)) return state;
  return make_distributed(state, sharding_spec(parameter), parameter.sizes().vec());
}

}  // namespace tessera::optim
