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
  /// On the first call, the data-parallel ranks exchange their numbers of batch rows in CPU memory.
  /// The first call also returns the element-wise maximum of `values` over the data-parallel ranks.
  /// Later calls return `values`. Collective; all ranks pass equally many values.
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

/// A part of a program, usually a model's forward, whose random numbers do not depend on the mesh.
/// Random operators on plain tensors also use the seed of manual_seed(). With tensor parallelism,
/// plain tensors are equal on every rank of the module's mesh. If a forward is
/// recomputed, the recomputation uses the region of the original forward.
class RandomRegion {
 public:
  /// Constructs a region inside `outer`, or nullptr. Without `rows`, the region uses the BatchRows
  /// of `outer`. `replicated_on`: a further mesh whose ranks have equal plain tensors.
  RandomRegion(std::shared_ptr<RandomRegion> outer, std::shared_ptr<BatchRows> rows,
               DeviceMesh replicated_on = {});

  const std::shared_ptr<BatchRows>& rows() const { return rows_; }
  /// Whether plain tensors in this region are the same on every rank of `mesh`.
  bool replicates_on(const DeviceMesh& mesh) const;
  /// Records that to_local() has returned different tensors on different ranks. Random operators on
  /// plain tensors then throw, because a plain tensor may be a shard.
  void note_part();
  /// Returns the global elements that `call` fills. The first call is collective if data-parallel
  /// ranks must compare their numbers of batch rows. Throws Error if the elements cannot be found.
  RandomPlace place_of(const RandomCall& call);

 private:
  friend class LocalPartsScope;

  RandomPlace find_place(const RandomCall& call) const;
  RandomRegion& outermost() { return outer_ == nullptr ? *this : outer_->outermost(); }

  std::shared_ptr<RandomRegion> outer_;
  std::shared_ptr<BatchRows> rows_;
  DeviceMesh replicated_on_;
  bool hands_out_parts_ = false;
  /// The global elements that each random operator of the forward filled. A recomputation reads the
  /// elements here, because detached inputs have no autograd history. Used in the outermost region.
  std::map<std::pair<std::uint64_t, std::uint64_t>, RandomPlace> places_;
};
using RandomRegionPtr = std::shared_ptr<RandomRegion>;

/// Returns this thread's RandomRegion, or nullptr. A backward uses the region of the thread that
/// called backward().
const RandomRegionPtr& random_region();
/// Finds the elements of the global tensor that `call` fills, in this thread's region. Outside of
/// any region a plain tensor counts as a whole tensor.
RandomPlace random_place(const RandomCall& call);
/// Whether a plain tensor counts as equal on every rank in an operator with a distributed tensor on
/// `mesh`. True in the forward of a module parallelized on `mesh`, in a ReplicationScope, and in
/// libtorch's backward formulas.
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
