#pragma once

namespace torch::autograd {
struct Node;
}

namespace tessera::detail {

/// Whether the operator of an autograd node works element by element, with broadcasting: each
/// dimension of its result is the same one of its arguments, from the right. By the names that
/// libtorch makes of the operators'.
bool is_pointwise(const torch::autograd::Node& node);

/// Whether its result has its argument's elements in their order, in other dimensions.
bool is_reshaping(const torch::autograd::Node& node);

}  // namespace tessera::detail
