#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera::detail {

/// Which part of a whole tensor a plain one is: its dimensions, each divided into digits in
/// row-major order, of which the whole tensor has `global` and this one `local` from `offset` on.
struct LocalPart {
  struct Digit {
    std::int64_t local = 1;
    std::int64_t global = 1;
    std::int64_t offset = 0;
    bool is_split() const { return local != global; }
  };
  using Dim = std::vector<Digit>;

  std::vector<Dim> dims = {};
  /// Of a piece: what of the dimension that was cut tells the pieces apart. Empty: it is none.
  Dim piece = {};
  /// Not empty: what it is can't be known, because of this.
  std::string unknown = {};
  std::string unknown_by = {};  ///< the operator that made it so; empty: none did
  bool of_a_program = false;    ///< so made by an autograd function of the program's own

  static LocalPart whole(c10::IntArrayRef sizes);
  bool is_whole() const;
};

bool is_split_dim(const LocalPart::Dim& dim);

/// Whether what is split comes first: this rank's share is one run of positions, in order.
bool is_in_order(const LocalPart::Dim& dim);

/// Whether `length` positions from `begin` on are this rank's share of one of the whole parts that
/// `dim` begins with, as in the result of a fused weight of which a rank has a share of each part.
bool has_whole_parts(const LocalPart::Dim& dim, std::int64_t begin, std::int64_t length);

/// What `tensor`, which requires a gradient, is of what it would be if the local tensors that it
/// was computed from (to_local) were whole. Autograd's graph is followed back to those; views and
/// what works element by element, row by row or on batches of matrices are understood. Not
/// collective.
LocalPart local_part(const at::Tensor& tensor);

/// What several results of one graph are, each found once.
class LocalParts {
 public:
  /// What a piece is that was cut along a dimension of which this rank has a part.
  enum class Pieces {
    kUnknown,
    kWhole,  ///< whole along that dimension, as one head of several is
  };
  explicit LocalParts(Pieces pieces) : pieces_(pieces) {}

  /// As local_part(), of the result that an edge leads to. Valid until the next call.
  const LocalPart& of(const torch::autograd::Edge& edge);

 private:
  using Key = std::pair<const torch::autograd::Node*, std::uint32_t>;
  bool add_missing(const torch::autograd::Edge& edge,
                   std::vector<torch::autograd::Edge>& open) const;
  LocalPart part_of(const torch::autograd::Edge& edge) const;

  Pieces pieces_;
  std::map<Key, LocalPart> found_;
};

}  // namespace tessera::detail
