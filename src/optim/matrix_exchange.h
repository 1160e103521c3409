#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/core/detail/layout_math.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::optim {

/// The layout and sizes of a distributed matrix.
struct SpreadMatrix {
  LayoutPtr layout = nullptr;
  std::int64_t rows = 0, columns = 0;
  friend bool operator==(const SpreadMatrix&, const SpreadMatrix&) = default;
};

/// Exchanges matrices for work that needs them unsharded. Assigns each matrix to one rank of the
/// mesh, its owner, so that the work (rows * columns * min(rows, columns) for each matrix) is
/// balanced. Sends the shards to the owners, and sends the results back. Along a mesh dimension
/// that replicates, the owner receives the shards of its own replica, and the result goes to all
/// replicas.
class MatrixExchange {
 public:
  /// Assigns the matrices to owners. Not collective: each rank computes the same assignment.
  MatrixExchange(const DeviceMesh& mesh, std::vector<SpreadMatrix> matrices);

  const DeviceMesh& mesh() const { return mesh_; }
  const std::vector<SpreadMatrix>& matrices() const { return matrices_; }
  /// For each matrix: the index in the mesh of the rank that owns the matrix.
  const std::vector<std::int64_t>& owners() const { return owners_; }

  using Work = std::function<at::Tensor(std::size_t matrix, const at::Tensor& whole)>;
  /// Exchanges the matrices. `locals`: this rank's shard of each matrix, all of one type. Calls
  /// `work` for each matrix that this rank owns; `work` returns a tensor of the same sizes and
  /// type. Returns this rank's shard of each result. Collective over the mesh: two all-to-alls.
  /// Each element is sent once to the owner, and each element of the result once to each rank that
  /// has the element.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& locals, const Work& work) const;

 private:
  struct RankShard {
    std::vector<std::int64_t> sizes;
    std::vector<Box> boxes;
    std::int64_t numel = 0;
    bool sent = false;  ///< whether this copy is sent to the rank that owns the matrix
  };
  bool sends(std::size_t matrix, std::int64_t rank) const;
  RankShard part(std::size_t matrix, std::int64_t rank) const;
  std::vector<at::Tensor> gather(const std::vector<at::Tensor>& locals) const;
  std::vector<at::Tensor> scatter(const std::vector<at::Tensor>& wholes,
                                  const std::vector<at::Tensor>& locals) const;
  at::Tensor exchange(const std::vector<std::vector<at::Tensor>>& to_ranks,
                      const std::vector<std::int64_t>& from_ranks, const at::Tensor& like) const;

  DeviceMesh mesh_;
  std::vector<SpreadMatrix> matrices_;
  std::vector<std::int64_t> owners_;
  std::int64_t self_;
  /// For each matrix: whether this rank sends its part to the owner.
  std::vector<bool> sends_;
  std::vector<std::size_t> owned_;  ///< matrices that this rank owns
  /// For each matrix in owned_: the parts of all ranks.
  std::vector<std::vector<RankShard>> parts_;
};

}  // namespace tessera::optim
TESSERA_API_FOR_TEST_END
