#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/dtensor/manual_seed.h"
#include "tessera/dtensor/random.h"
#include "tessera/export.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/internals/detail/threads.h"
#include "tessera/kernels/detail/random.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// Where the elements of a local tensor are in the tensor that one rank would have.
struct RandomPlace {
  kernels::GlobalPlace elements;
  /// The sizes that the local tensor is viewed with, where `elements` divides its dimensions.
  std::vector<std::int64_t> local_sizes;
  /// Whether ranks draw for different elements.
  bool is_part = false;
};

/// The elements of a tensor by its own layout; all elements of a plain one.
RandomPlace own_place(const at::Tensor& tensor);

/// Fills `local`, a plain tensor of a floating-point type. Without autograd.
void fill_random(const at::Tensor& local, const RandomPlace& place,
                 const kernels::Distribution& distribution, RandomKey key);

/// What a random operator draws for.
struct RandomCall {
  std::string_view name;  ///< for messages
  at::Tensor tensor;      ///< the one that is filled, or dropped from; plain or distributed
  /// A tensor of the model that it has its sizes from; undefined: it was made of sizes alone.
  at::Tensor source;
  /// Identifies this call; the same in its recomputation.
  RandomKey id;
};

/// The rows that data-parallel ranks give to one forward, the first rank's first.
class BatchRows {
 public:
  /// This rank's rows of an input of `sizes` (none: the forward had no tensor), on ranks that are
  /// numbered by `dims`, 1-D meshes, the outermost first.
  BatchRows(std::vector<DeviceMesh> dims, std::optional<std::vector<std::int64_t>> sizes);
  /// Every tensor is part `index` of `count` equal ones.
  BatchRows(std::int64_t index, std::int64_t count) : index_(index), ranks_(count) {}

  /// Whether a BatchPart of the program set it, and not the input of a forward.
  bool is_given() const { return index_ >= 0; }
  /// Asks the other ranks how many rows they have, once. Returns the largest of each of `values` on
  /// any rank; equally many on all. Collective, between the hosts.
  std::vector<std::int64_t> settle(std::vector<std::int64_t> values = {});
  bool is_settled() const { return settled_; }
  /// Moves `place`, of a tensor that would have these sizes on this rank alone, to its place in the
  /// tensor of all rows. Collective as settle(). Throws Error where that place is unknown.
  void move(RandomPlace& place, const RandomCall& call, c10::IntArrayRef sizes);

 private:
  bool begins_with_rows(const RandomCall& call, c10::IntArrayRef sizes) const;

  std::int64_t index_ = -1;  ///< < 0: that of rows
  std::vector<DeviceMesh> dims_;
  std::int64_t ranks_ = 1;
  std::optional<std::vector<std::int64_t>> sizes_;
  bool settled_ = false;
  bool any_has_one_ = false;  ///< a rank that has exactly one row
  std::int64_t before_ = 0;
};

/// A part of a program, usually the forward of a model, whose random operators draw on each rank
/// what one rank would draw: those of at:: on plain tensors too, with the numbers of manual_seed.
/// If tensor parallelism began it, plain tensors in it are the same on every rank of a mesh.
/// Recomputations share it with their forward.
class RandomRegion {
 public:
  /// Within `outer` (or nullptr), and with its rows unless `rows` are given. `replicated_on`: the
  /// mesh whose ranks all have the same plain tensors; undefined: only that of `outer`.
  RandomRegion(std::shared_ptr<RandomRegion> outer, std::shared_ptr<BatchRows> rows,
               DeviceMesh replicated_on = {});

  const std::shared_ptr<BatchRows>& rows() const { return rows_; }
  /// Whether plain tensors are the same on every rank of `mesh`.
  bool replicates_on(const DeviceMesh& mesh) const;
  /// A distributed tensor has handed out a local one that is not the same on all ranks (to_local).
  /// From now on no random operator on a plain tensor knows for which elements it draws.
  void note_part();
  /// Where the elements that `call` draws for are. Collective at the first call where data-parallel
  /// ranks have rows to compare. Throws Error where that is unknown.
  RandomPlace place_of(const RandomCall& call);

 private:
  friend class LocalPartsScope;

  RandomPlace find_place(const RandomCall& call) const;
  RandomRegion& outermost() { return outer_ == nullptr ? *this : outer_->outermost(); }

  std::shared_ptr<RandomRegion> outer_;
  std::shared_ptr<BatchRows> rows_;
  DeviceMesh replicated_on_;
  bool hands_out_parts_ = false;
  /// The places that the outermost region found in forward, for recomputations, whose inputs look
  /// like parameters.
  std::map<std::pair<std::uint64_t, std::uint64_t>, RandomPlace> places_;
};
using RandomRegionPtr = std::shared_ptr<RandomRegion>;

/// That of this thread, or nullptr. A backward has that of the thread that calls it.
const RandomRegionPtr& random_region();
/// In this thread's region; outside of one, every plain tensor is whole.
RandomPlace random_place(const RandomCall& call);
/// Whether a plain tensor next to a distributed one on `mesh` counts as the same on every rank
/// of it: in the forward of a module that was parallelized on that mesh, in a ReplicationScope, and
/// in the formulas of backward, but not where a hook or a function of the program may run.
bool plain_is_replicated_on(const DeviceMesh& mesh);

/// While it exists, local tensors go to code that returns none of them: after it, draws know the
/// places of their elements again.
class LocalPartsScope {
 public:
  LocalPartsScope();
  LocalPartsScope(const LocalPartsScope&) = delete;
  LocalPartsScope& operator=(const LocalPartsScope&) = delete;
  ~LocalPartsScope();

 private:
  RandomRegionPtr region_;
  bool before_ = false;
};

struct ActiveRandomRegion {
  RandomRegionPtr region;
  bool replays = false;
};

/// While it exists, `region` is that of this thread; nullptr: none. `replays`: it has drawn the
/// same numbers before, in forward.
class RandomRegionScope {
 public:
  explicit RandomRegionScope(RandomRegionPtr region, bool replays = false);

 private:
  CarriedScope<Carried::kRandomRegion, ActiveRandomRegion> scope_;
  IncludeKeys guard_;
};

}  // namespace tessera::detail
TESSERA_API_END
