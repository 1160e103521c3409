// The tensors of a run on the mesh beside those of one rank, and how they are made comparable.

#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "verify/seen_run.h"

namespace tessera::observe {

/// The dimensions of `mesh` that are not in `dims`.
std::vector<std::string> other_dims(const DeviceMesh& mesh, const std::vector<std::string>& dims);

/// One tensor of both runs; undefined where a run has none.
struct Pair {
  std::string name, fqn;  ///< as in SeenTensor
  at::Tensor on_mesh, one_rank;
  double noise = 0;
  std::string layout{};  ///< on the mesh, for messages
};

/// In the order of one rank's run; `noise` is for its tensors.
std::vector<Pair> pairs_of(const std::vector<SeenTensor>& on_mesh,
                           const std::vector<SeenTensor>& one_rank,
                           const std::vector<double>& noise);

/// The ranks of a mesh, by whether they have different samples.
class PairingRanks {
 public:
  PairingRanks(const DeviceMesh& mesh, const std::vector<std::string>& batch_dims);

  /// Makes distributed tensors whole, and joins plain parts. Collective. Throws Error, on every
  /// rank, if the ranks of one part of the batch do not have the same tensors; with `all`, if any
  /// ranks do not.
  void make_whole(std::vector<Pair>& pairs, bool all) const;
  /// The mean over the parts of the batch. Collective.
  at::Tensor mean_over_batches(const at::Tensor& tensor) const;

 private:
  void agree(const DeviceMesh& among, const std::vector<Pair>& pairs) const;
  std::string disagreement(const DeviceMesh& among, const std::string& own) const;
  void join_parts(std::vector<Pair>& pairs) const;
  void join(Pair& pair) const;

  DeviceMesh mesh_;
  DeviceMesh batches_;  ///< ranks with different samples, through this one; none: all have the same
  DeviceMesh peers_;    ///< ranks with the same samples; none: this rank alone has its own
};

}  // namespace tessera::observe
