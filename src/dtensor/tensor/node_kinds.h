#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace tessera::detail {

/// A dimension of an operator's argument that it reads across, or in an order of its own.
struct ReadDim {
  static constexpr std::int64_t kAll = INT64_MAX;
  std::size_t argument = 0;  ///< the number of the node's edge
  std::int64_t dim = 0;      ///< < 0: from the end; kAll: every one
  std::int64_t pieces = 1;   ///< as many equal ones meet position by position: glu's two halves
};

/// What an operator does along a dimension, which is not what it would do on all ranks' parts
/// together.
struct NodeKind {
  bool cuts = false;     ///< chunk, split, slices, select, unbind
  bool reduces = false;  ///< its result has the dimension no more, or with size 1
  /// Each dimension of its result is the same one of its arguments, from the right: of all, of the
  /// first alone, or of result i the one of argument i. What works element by element is in
  /// pointwise_nodes.h.
  enum class Aligned : std::uint8_t { kNot, kWithAll, kWithFirst, kEach };
  Aligned aligned = Aligned::kNot;
  std::vector<ReadDim> (*reads)(const torch::autograd::Node&) = nullptr;
};

/// That of a node, from the one table of all such operators and of the functions that layers above
/// have registered (function_kind.h); nullptr: it is none of them.
const NodeKind* kind_of(const torch::autograd::Node& node);
/// The operator as it is called: "softmax" for SoftmaxBackward0.
std::string operator_name(const torch::autograd::Node& node);

/// Whether it is an autograd function that nobody has registered, a program's: what that does is
/// not known.
bool is_of_a_program(const torch::autograd::Node& node);

}  // namespace tessera::detail
