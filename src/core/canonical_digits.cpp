#include "canonical_digits.h"

#include <span>
#include <utility>

namespace tessera::detail {
namespace {

using MeshSizes = std::vector<std::int64_t>;

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

std::int64_t at(const MeshSizes& sizes, int dim) {
  return sizes[static_cast<std::size_t>(dim)];
}

/// Whether cutting `extent * factor` over `mesh_dims` gives `factor` times what cutting `extent`
/// gives, at every coordinate.
bool scales(const MeshSizes& mesh, std::int64_t extent, std::int64_t factor,
            std::span<const int> mesh_dims) {
  if (mesh_dims.empty() || extent == 0) return true;
  const auto parts = at(mesh, mesh_dims.front());
  const auto chunk = ceil_div(extent, parts);
  if (ceil_div(extent * factor, parts) != chunk * factor) return false;
  const auto rest = mesh_dims.subspan(1);
  return scales(mesh, chunk, factor, rest) && scales(mesh, extent % chunk, factor, rest);
}

/// The largest piece of the digit that a coordinate gets.
std::int64_t largest_piece(const MeshSizes& mesh, const Digit& digit) {
  auto extent = digit.extent;
  for (const int dim : digit.mesh_dims) extent = ceil_div(extent, at(mesh, dim));
  return extent;
}

/// Whether `major` followed by `minor` is one digit over the mesh dimensions of both.
bool is_one_digit(const MeshSizes& mesh, const Digit& major, const Digit& minor) {
  if (major.mesh_dims.empty()) return mesh_product(mesh, minor.mesh_dims) == 1;
  const bool adjoin = minor.mesh_dims.empty() || largest_piece(mesh, major) == 1;
  return adjoin && scales(mesh, major.extent, minor.extent, major.mesh_dims);
}

void append(Digit& major, const Digit& minor) {
  major.extent *= minor.extent;
  major.mesh_dims.insert(major.mesh_dims.end(), minor.mesh_dims.begin(), minor.mesh_dims.end());
}

bool is_trivial(const Digit& digit) {
  return digit.extent == 1 && digit.mesh_dims.empty();
}

}  // namespace

std::int64_t mesh_product(const MeshSizes& mesh_sizes, const std::vector<int>& mesh_dims) {
  std::int64_t product = 1;
  for (const int dim : mesh_dims) product *= at(mesh_sizes, dim);
  return product;
}

std::vector<Digit> canonical_digits(const MeshSizes& mesh_sizes, std::vector<Digit> digits) {
  std::vector<Digit> out;
  for (auto& digit : digits) {
    if (is_trivial(digit) && digits.size() > 1) continue;
    if (!out.empty() && is_one_digit(mesh_sizes, out.back(), digit)) {
      append(out.back(), digit);
    } else {
      out.push_back(std::move(digit));
    }
  }
  if (out.size() != 1) return out;
  if (out.front().mesh_dims.empty()) return {};
  out.front().extent = 0;
  return out;
}

}  // namespace tessera::detail
