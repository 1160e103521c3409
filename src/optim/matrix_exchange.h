#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/core/layout_math.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::optim {

/// A matrix that lies on a mesh.
struct SpreadMatrix {
  LayoutPtr layout = nullptr;
  std::int64_t rows = 0, columns = 0;
  friend bool operator==(const SpreadMatrix&, const SpreadMatrix&) = default;
};

/// For work that needs matrices whole: deals them to the ranks of their mesh so that the work (of
/// rows * columns * min(rows, columns) each) is even, and takes them there and back. Where a mesh
/// dimension replicates, an owner gets the copy of its own replica, and one rank works for all.
class MatrixExchange {
 public:
  /// Pure: each rank plans the same.
  MatrixExchange(const DeviceMesh& mesh, std::vector<SpreadMatrix> matrices);

  const DeviceMesh& mesh() const { return mesh_; }
  const std::vector<SpreadMatrix>& matrices() const { return matrices_; }
  /// The index in the mesh of the rank that works on each matrix.
  const std::vector<std::int64_t>& owners() const { return owners_; }

  using Work = std::function<at::Tensor(std::size_t matrix, const at::Tensor& whole)>;
  /// `locals`: this rank's part of each matrix, all of one type. Returns its part of what `work`
  /// makes of each, of the same sizes and type. Collective over the mesh: two all-to-alls, in which
  /// each element travels once there and once to each rank that holds it.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& locals, const Work& work) const;

 private:
  struct Part {
    std::vector<std::int64_t> sizes;
    std::vector<Box> boxes;
    std::int64_t numel = 0;
    bool sent = false;  ///< the owner takes this copy
  };
  bool sends(std::size_t matrix, std::int64_t rank) const;
  Part part(std::size_t matrix, std::int64_t rank) const;
  std::vector<at::Tensor> gather(const std::vector<at::Tensor>& locals) const;
  std::vector<at::Tensor> scatter(const std::vector<at::Tensor>& wholes,
                                  const std::vector<at::Tensor>& locals) const;
  at::Tensor exchange(const std::vector<std::vector<at::Tensor>>& to_ranks,
                      const std::vector<std::int64_t>& from_ranks, const at::Tensor& like) const;

  DeviceMesh mesh_;
  std::vector<SpreadMatrix> matrices_;
  std::vector<std::int64_t> owners_;
  std::int64_t self_;
  std::vector<bool> sends_;               ///< of this rank, for each matrix
  std::vector<std::size_t> owned_;        ///< matrices of this rank
  std::vector<std::vector<Part>> parts_;  ///< beside owned_: of each rank
};

}  // namespace tessera::optim
