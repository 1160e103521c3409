#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/dtensor/random.h"
#include "tessera/export.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/threads.h"
#include "tessera/kernels/detail/random.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// The global elements that a local tensor contains, for which random numbers are drawn.
struct RandomPlace {
  kernels::GlobalPlace elements;
  /// The sizes of the local tensor. If `elements` splits dimensions of the tensor, `local_sizes`
  /// are the split sizes, and fill_random() views the local tensor in these sizes.
  std::vector<std::int64_t> local_sizes;
  /// Whether this rank's elements differ from the elements of other ranks.
  bool is_part = false;
};

/// Returns which global elements this rank stores; for a plain tensor, all elements.
RandomPlace own_place(const at::Tensor& tensor);

/// Fills `local`, a plain floating-point tensor, with random numbers. Not recorded by autograd.
void fill_random(const at::Tensor& local, const RandomPlace& place,
                 const kernels::Distribution& distribution, RandomKey key);

/// A call of a random operator. A RandomRegion finds which global elements the call fills.
struct RandomCall {
  std::string_view name;  ///< name of the random operator, for messages
  at::Tensor tensor;      ///< the plain or distributed tensor to fill, or the input of dropout
  /// The tensor that determines the sizes of the operator's result, such as `self` of rand_like;
  /// undefined if the program passed the sizes as numbers.
  at::Tensor source;
  /// Identifies this call of a random operator. The recomputation of a call has the same id.
  RandomKey id;
};

/// The number of batch rows on each data-parallel rank, in rank order, for one forward.
class BatchRows {
 public:
  /// Constructs the BatchRows of a forward whose input has `sizes` on this rank (nullopt: no input
  /// tensor). `dims`: the data-parallel mesh dimensions as 1-D meshes, outermost first.
  BatchRows(std::vector<DeviceMesh> dims, std::optional<std::vector<std::int64_t>> sizes);
  /// Constructs the BatchRows of a forward on part `index` of `count` equal parts of the batch.
  BatchRows(std::int64_t index, std::int64_t count) : index_(index), ranks_(count) {}

  /// True if a BatchPart scope gives the numbers of batch rows, false if the sizes of the forward's
  /// input give these numbers.
  bool is_given() const { return index_ >= 0; }
  /// The first call exchanges the numbers of batch rows between the data-parallel ranks, in CPU
  /// memory, and also returns the element-wise maximum of `values` over these ranks. All ranks must
  /// pass equally many values. Later calls only return `values`. Collective.
  std::vector<std::int64_t> settle(std::vector<std::int64_t> values = {});
  bool is_settled() const { return settled_; }
  /// Converts indices in this rank's tensor (of sizes `sizes`) to indices in the tensor with all
  /// ranks' rows. Collective like settle(). Throws Error if this rank's rows are unknown.
  void move(RandomPlace& place, const RandomCall& call, c10::IntArrayRef sizes);

 private:
  bool begins_with_rows(const RandomCall& call, c10::IntArrayRef sizes) const;

  /// Index of this rank's part of the batch; negative if no BatchPart exists.
  std::int64_t index_ = -1;
  std::vector<DeviceMesh> dims_;
  std::int64_t ranks_ = 1;
  std::optional<std::vector<std::int64_t>> sizes_;
  bool settled_ = false;
  bool any_has_one_ = false;  ///< whether some rank has exactly one row of the batch
  std::int64_t before_ = 0;
};

/// A part of a program, usually a model's forward, whose random numbers do not depend on the mesh:
/// each rank draws the numbers of its own elements of the global tensors. In a region, at::
/// operators on plain tensors also use the seed of manual_seed(). In the region of a
/// tensor-parallel module, plain tensors are the same on every rank of the module's mesh. A
/// recomputed forward (activation checkpointing) uses the region of the first forward.
class RandomRegion {
 public:
  /// Constructs a region inside `outer` (which may be nullptr). The region uses the BatchRows of
  /// `outer` unless `rows` are given. `replicated_on`: a mesh whose ranks all have equal plain
  /// tensors, in addition to the mesh of `outer`.
  RandomRegion(std::shared_ptr<RandomRegion> outer, std::shared_ptr<BatchRows> rows,
               DeviceMesh replicated_on = {});

  const std::shared_ptr<BatchRows>& rows() const { return rows_; }
  /// Whether plain tensors in this region are the same on every rank of `mesh`.
  bool replicates_on(const DeviceMesh& mesh) const;
  /// Records that to_local() has returned different local tensors on different ranks. Afterwards,
  /// random operators on plain tensors throw, because a plain tensor may be a shard of a global
  /// tensor.
  void note_part();
  /// Finds the global elements that `call` fills; throws Error if place_of() cannot find these
  /// elements. The first call of place_of() is collective if data-parallel ranks must compare their
  /// numbers of batch rows.
  RandomPlace place_of(const RandomCall& call);

 private:
  friend class LocalPartsScope;

  RandomPlace find_place(const RandomCall& call) const;
  RandomRegion& outermost() { return outer_ == nullptr ? *this : outer_->outermost(); }

  std::shared_ptr<RandomRegion> outer_;
  std::shared_ptr<BatchRows> rows_;
  DeviceMesh replicated_on_;
  bool hands_out_parts_ = false;
  /// For each call of a random operator in the outermost region's forward: the global elements that
  /// the call filled. A recomputation reads this map, because the detached inputs of a recomputed
  /// function have no autograd history from which the elements could be found.
  std::map<std::pair<std::uint64_t, std::uint64_t>, RandomPlace> places_;
};
using RandomRegionPtr = std::shared_ptr<RandomRegion>;

/// Returns this thread's RandomRegion, or nullptr. A backward uses the region of the thread that
/// called backward().
const RandomRegionPtr& random_region();
/// Finds the elements of the global tensor that `call` fills, in this thread's region. Outside of
/// any region a plain tensor counts as a whole tensor.
RandomPlace random_place(const RandomCall& call);
/// Whether a plain tensor that an operator combines with a distributed tensor on `mesh` counts as
/// the same on every rank. True in the forward of a module that was parallelized on this mesh, in a
/// ReplicationScope, and in libtorch's backward formulas. False in a backward's hooks and functions
/// that the program defines.
bool plain_is_replicated_on(const DeviceMesh& mesh);

/// While a LocalPartsScope exists, to_local() does not call RandomRegion::note_part(). Used by code
/// that does not return the local tensors to the program.
class LocalPartsScope : NoCopy {
 public:
  LocalPartsScope();
  ~LocalPartsScope();

 private:
  RandomRegionPtr region_;
  bool before_ = false;
};

struct ActiveRandomRegion {
  RandomRegionPtr region;
  bool replays = false;
};

/// Sets this thread's RandomRegion while the scope exists; nullptr: no region. `replays`: whether
/// the scope is for a recomputation, which repeats the random numbers of a forward.
class RandomRegionScope {
 public:
  explicit RandomRegionScope(RandomRegionPtr region, bool replays = false);

 private:
  CarriedScope<Carried::kRandomRegion, ActiveRandomRegion> scope_;
  IncludeKeys guard_;
};

}  // namespace tessera::detail
TESSERA_API_END
