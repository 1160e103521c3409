#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "parameter_group/parameter_group.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera::fsdp {

/// Asked once.
using ParameterGroupsToCompare = std::function<std::vector<const ParameterGroup*>()>;

/// The least and the most that a rank has.
struct RowRange {
  std::int64_t least = 0;
  std::int64_t most = 0;
};

/// What the ranks exchange about random numbers when a training forward of a model begins: how many
/// rows they have, and how many random operators they have counted. A rank that skipped some, as
/// one without rows may, continues with the others' counts.
class RandomAgreement {
 public:
  /// A training forward of the model of `modules` begins on the ranks of `dims`, which together
  /// have `rows`; this rank has `count` of them. The first exchange includes the origins of
  /// `groups`, which must be the same on all ranks. Collective over the ranks, between the hosts,
  /// in the first two forwards, and in later ones if the model has drawn (all ranks then know
  /// that). A model that draws nothing pays nothing. Throws PeerError, and Error on all ranks that
  /// share a parameter whose shards come from different tensors.
  void begin_forward(const std::vector<nn::ModuleBase*>& modules,
                     const std::vector<DeviceMesh>& dims,
                     const std::shared_ptr<tessera::detail::BatchRows>& rows, std::int64_t count,
                     const ParameterGroupsToCompare& groups);
  /// How many rows the ranks had when they last compared them.
  const RowRange& rows() const { return rows_; }

 private:
  using Counts = std::vector<std::int64_t>;

  bool compared_origins_ = false;
  Counts agreed_;       ///< in the last forward that compared them; empty: none has
  bool draws_ = false;  ///< on any rank
  RowRange rows_;
  bool quiet_ = false;  ///< two forwards have compared them, and nothing was drawn
  /// The rows of the forward before this one, where its ranks did not compare them.
  std::shared_ptr<tessera::detail::BatchRows> unasked_;
};

}  // namespace tessera::fsdp
