#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace tessera::nn {

/// Calls `visit` with each at::Tensor inside a value. Values of other types have none. For a struct
/// of your own, provide in its namespace:
///   template <class Visit> void visit_tensors(MyBatch& batch, Visit&& visit) { visit(batch.x); }
template <class T, class Visit>
void visit_tensors(T& value, Visit&& visit);

namespace detail {

template <class T>
struct TensorVisitor {
  template <class Visit>
  static void apply(T&, Visit&&) {}
};

}  // namespace detail
}  // namespace tessera::nn
