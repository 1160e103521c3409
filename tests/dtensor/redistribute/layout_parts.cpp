#include "layout_parts.h"

#include <ATen/ATen.h>

#include <utility>

#include "core/layout/oracle.h"

namespace tessera::testing {
namespace {

/// What coordinate `i` of `n` holds of integers that are partial: unlike terms, none of them
/// the value everywhere.
at::Tensor term(const at::Tensor& value, ReduceOp op, std::int64_t i, std::int64_t n) {
  const auto shift = value.add(i).remainder(n);  // each of 0 to n - 1 once among the coordinates
  switch (op) {
    case ReduceOp::kMax:
      return value - shift;
    case ReduceOp::kMin:
      return value + shift;
    case ReduceOp::kAvg:
      return value + shift * 2 - (n - 1);
    default:
      return i == 0 ? value + shift - n * (n - 1) / 2 : shift;
  }
}

at::Tensor combine(const at::Tensor& terms, ReduceOp op) {
  switch (op) {
    case ReduceOp::kMax:
      return terms.amax(0);
    case ReduceOp::kMin:
      return terms.amin(0);
    case ReduceOp::kAvg:
      return terms.mean(0);
    default:
      return terms.sum(0);
  }
}

}  // namespace

at::Tensor piece(at::Tensor whole, const Layout& layout, const Indices& coordinate) {
  for (int dim = 0; dim < layout.tensor_ndim(); ++dim) {
    const auto indices = layout_indices(layout, dim, whole.size(dim), coordinate);
    whole = whole.index_select(dim, at::tensor(indices, at::kLong));
  }
  return whole;
}

at::Tensor local_of(const at::Tensor& whole, const Layout& layout, const Indices& coordinate) {
  auto local = piece(whole, layout, coordinate);
  for (const auto& partial : layout.partial()) {
    const auto m = pos(partial.mesh_dim);
    local = term(local, partial.op, coordinate[m], layout.mesh_sizes()[m]);
  }
  return local;
}

std::vector<at::Tensor> reduced(std::vector<at::Tensor> locals, const Layout& layout) {
  const auto all = coordinates(layout.mesh_sizes());
  for (auto partial = layout.partial().rbegin(); partial != layout.partial().rend(); ++partial) {
    std::vector<at::Tensor> next;
    for (auto place : all) {
      place[pos(partial->mesh_dim)] = 0;
      std::vector<at::Tensor> terms;
      for (std::size_t i = 0; i < all.size(); ++i) {
        auto other = all[i];
        other[pos(partial->mesh_dim)] = 0;
        if (other == place) {
          terms.push_back(locals[i]);
        }
      }
      next.push_back(combine(at::stack(terms), partial->op));
    }
    locals = std::move(next);
  }
  return locals;
}

}  // namespace tessera::testing
