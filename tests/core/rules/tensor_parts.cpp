#include "tensor_parts.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Formatting.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "tessera/core/detail/layout_math.h"

namespace tessera::testing {
namespace {

at::Tensor identity_like(const at::Tensor& tensor, ReduceOp op) {
  switch (op) {
    case ReduceOp::kMax:
      return tensor - at::rand_like(tensor);
    case ReduceOp::kMin:
      return tensor + at::rand_like(tensor);
    default:
      return at::full_like(tensor, op == ReduceOp::kProduct ? 1 : 0);
  }
}

/// The term of `tensor` at one coordinate of a partial mesh dimension: terms differ and reduce to
/// it.
at::Tensor term(const at::Tensor& tensor, ReduceOp op, std::int64_t index, std::int64_t count) {
  if (count == 1) {
    return tensor;
  }
  const bool last = index == count - 1;
  const auto step = static_cast<double>(index + 1);
  const double steps = static_cast<double>(count * (count - 1)) / 2;
  switch (op) {
    case ReduceOp::kSum:
      return last ? tensor * (1.0 - 0.25 * steps) - steps : tensor * (0.25 * step) + step;
    case ReduceOp::kAvg:
      return last ? tensor - steps : tensor + step;
    case ReduceOp::kProduct:
      return last ? tensor / std::pow(2.0, static_cast<double>(count - 1))
                  : at::full_like(tensor, 2);
    default:
      return last ? tensor : identity_like(tensor, op);
  }
}

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  switch (op) {
    case ReduceOp::kMax:
      return at::maximum(a, b);
    case ReduceOp::kMin:
      return at::minimum(a, b);
    case ReduceOp::kProduct:
      return a * b;
    default:
      return a + b;
  }
}

/// Reduces over one mesh dimension: coordinates that differ only in it become one.
void reduce(std::vector<Coordinate>& at, std::vector<at::Tensor>& locals, const PartialDim& partial,
            std::int64_t count) {
  std::vector<Coordinate> kept;
  std::vector<at::Tensor> reduced;
  for (std::size_t i = 0; i < at.size(); ++i) {
    Coordinate rest = at[i];
    rest[static_cast<std::size_t>(partial.mesh_dim)] = 0;
    const auto found = std::find(kept.begin(), kept.end(), rest);
    if (found == kept.end()) {
      kept.push_back(rest);
      reduced.push_back(locals[i]);
    } else {
      auto& sum = reduced[static_cast<std::size_t>(found - kept.begin())];
      sum = combine(sum, locals[i], partial.op);
    }
  }
  if (partial.op == ReduceOp::kAvg) {
    for (auto& sum : reduced) {
      sum = sum / static_cast<double>(count);
    }
  }
  at = std::move(kept);
  locals = std::move(reduced);
}

}  // namespace

std::vector<Coordinate> coordinates(const std::vector<std::int64_t>& mesh) {
  std::vector<Coordinate> all{{}};
  for (std::int64_t size : mesh) {
    std::vector<Coordinate> longer;
    for (const auto& head : all) {
      for (std::int64_t i = 0; i < size; ++i) {
        longer.push_back(head);
        longer.back().push_back(i);
      }
    }
    all = std::move(longer);
  }
  return all;
}

double tolerance_of(const std::vector<at::Tensor>& tensors) {
  const bool single = std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kFloat;
  });
  return single ? 1e-5 : 1e-9;
}

bool agree(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) {
    return false;
  }
  const auto type = a.is_complex() ? at::kComplexDouble : at::kDouble;
  return at::allclose(a.to(type), b.to(type), tolerance, tolerance, true);
}

at::Tensor index_of(const Layout& layout, int dim, std::int64_t size, const Coordinate& at) {
  return at::tensor(global_indices(layout, dim, size, at), at::kLong);
}

at::Tensor part(const at::Tensor& tensor, const Layout& layout, const Coordinate& at) {
  at::Tensor local = tensor;
  for (int dim = 0; dim < layout.tensor_ndim(); ++dim) {
    if (layout.digits(dim).empty()) {
      continue;
    }
    local = local.index_select(dim, index_of(layout, dim, tensor.size(dim), at));
  }
  for (const PartialDim& partial : layout.partial()) {
    const auto m = static_cast<std::size_t>(partial.mesh_dim);
    local = term(local, partial.op, at[m], layout.mesh_sizes()[m]);
  }
  return local.clone(at::MemoryFormat::Contiguous);
}

at::Tensor assemble(std::vector<Coordinate> at, std::vector<at::Tensor> locals,
                    const Layout& layout, const std::vector<std::int64_t>& sizes, double tolerance,
                    std::string& problem) {
  for (std::size_t i = 0; i < at.size(); ++i) {
    if (locals[i].sizes().vec() != local_sizes(layout, sizes, at[i])) {
      std::ostringstream out;
      out << "local sizes " << locals[i].sizes() << ", the layout says "
          << c10::IntArrayRef(local_sizes(layout, sizes, at[i]));
      problem = out.str();
      return {};
    }
  }
  for (auto partial = layout.partial().rbegin(); partial != layout.partial().rend(); ++partial) {
    reduce(at, locals, *partial, layout.mesh_sizes()[static_cast<std::size_t>(partial->mesh_dim)]);
  }
  auto whole = at::zeros(sizes, locals[0].options());
  auto written = at::zeros(sizes, at::kBool);
  for (std::size_t i = 0; i < at.size(); ++i) {
    auto flat = at::zeros({1}, at::kLong).squeeze(0);
    for (int dim = 0; dim < layout.tensor_ndim(); ++dim) {
      const auto size = sizes[static_cast<std::size_t>(dim)];
      flat = flat.unsqueeze(-1) * size + index_of(layout, dim, size, at[i]);
    }
    flat = flat.reshape(-1);
    const auto values = locals[i].reshape(-1);
    const auto before = whole.reshape(-1).index_select(0, flat);
    const auto known = written.reshape(-1).index_select(0, flat);
    if (!agree(at::where(known, before, values), values, tolerance)) {
      problem = "replicas differ";
    }
    whole.view(-1).index_copy_(0, flat, values);
    written.view(-1).index_fill_(0, flat, true);
  }
  if (!written.all().item<bool>()) {
    problem = "some elements are nobody's";
  }
  return whole;
}

}  // namespace tessera::testing
