#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tessera::detail {

// What autograd's graph tells of operators that cut a tensor and put it together.

/// Whether what it was computed from is not looked at: a parameter, or what to_local gave.
bool is_source(const torch::autograd::Node& node);
/// The sizes of the forward's result that `edge` leads to.
std::vector<std::int64_t> sizes_of_result(const torch::autograd::Edge& edge);
/// `index`, which may count from the end, of `size`.
std::int64_t counted_from_front(std::int64_t index, std::int64_t size);

/// What a result is of what it was cut from.
struct Piece {
  std::int64_t dim = 0;      ///< as the caller gave it: < 0 counts from the end
  std::int64_t begin = 0;    ///< its first position
  std::int64_t length = 1;   ///< how many positions it has
  std::int64_t count = 0;    ///< of equal pieces; 0: of others
  bool removes_dim = false;  ///< select and unbind
};
/// That of the result that `edge` leads to (chunk, split, slices, select, unbind); nullopt: it was
/// not cut, or so that the pieces of a part are those of the whole (every second element).
std::optional<Piece> piece_of(const torch::autograd::Edge& edge);

/// Of cat and stack: the dimension; nullopt: another operator.
struct PutTogether {
  std::int64_t dim = 0;
  bool adds_dim = false;  ///< stack
};
std::optional<PutTogether> puts_together(const torch::autograd::Node& node);

/// The parameter nearest to the result of `edge` that has as many rows as the distributed tensor
/// features, from which it was handed out. Undefined: none is found.
at::Tensor parameter_behind(const torch::autograd::Edge& edge);

}  // namespace tessera::detail
