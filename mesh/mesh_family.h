// Meshes of one world share a family, which owns all descriptions, so that slices and roots may
// point to each other. Equal meshes are one object, so that comparing meshes compares pointers;
// dtensor compares meshes in each operator.

#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/core/mesh_shape.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

/// The immutable description of a mesh, and the groups made for it so far.
struct DeviceMesh::Impl {
  Impl(Family* family, const Impl* root, std::vector<int> ranks, MeshShape shape, int own_rank);

  // A plain pointer, because every handle owns the family, which owns this object.
  Family* family;
  const Impl* root;
  // World ranks, row-major in `shape`.
  std::vector<int> ranks;
  MeshShape shape;
  // Empty if this process's rank is not a member.
  std::vector<std::int64_t> coordinate;

  /// The groups of single dimensions, found without a lock, because every collective looks one up.
  mutable std::vector<std::atomic<comm::Communicator*>> dim_groups;
  // Guards `groups`; dim_groups are atomic. Keys are lists of dimensions, because their order
  // decides the order of the ranks.
  mutable std::mutex mutex;
  mutable std::map<std::vector<int>, comm::CommunicatorPtr> groups;
};

/// All meshes of a world, interned: equal meshes are one object. Every handle owns the family, so
/// the family lives as long as any mesh. Thread safe.
class DeviceMesh::Family : public std::enable_shared_from_this<Family> {
 public:
  /// The family of `world`, of which there is one at a time. It is destroyed with its last mesh.
  static std::shared_ptr<Family> of(const comm::WorldPtr& world);

  explicit Family(comm::WorldPtr world) : world_(std::move(world)) {}
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;
  ~Family();

  const comm::WorldPtr& world() const { return world_; }
  std::shared_ptr<const Impl> handle(const Impl* impl) { return {shared_from_this(), impl}; }

  /// The unique mesh with these ranks and this shape that was made from `root` (nullptr: made
  /// directly).
  const Impl* member(const Impl* root, std::vector<int> ranks, MeshShape shape);

  /// The dimensions of the root that have the ranks of `mesh` in the same order. If there are none,
  /// the dimensions of `mesh` itself, which unflatten() may have made.
  static std::vector<std::string> dims_of_root(const Impl& mesh);
  /// Records that `name` is the flattening of the dimensions `dims` of `root`, so that slicing
  /// finds it. If the name already stands for other dimensions, returns these.
  std::vector<std::string> remember_flattened(const Impl* root, const std::string& name,
                                              const std::vector<std::string>& dims);
  /// The dimensions that were flattened to `name`; empty if there was no such flattening.
  std::vector<std::string> flattened_dims(const Impl* root, const std::string& name) const;

 private:
  using Key = std::tuple<const Impl*, std::vector<int>, std::vector<std::int64_t>,
                         std::vector<std::string>>;

  comm::WorldPtr world_;
  mutable std::mutex mutex_;
  // Entries are never removed while the family exists, because a program has few meshes. The root
  // is part of the key, because equal slices of different roots are different meshes.
  std::map<Key, std::unique_ptr<Impl>> members_;
  // Keys are root and name.
  std::map<std::pair<const Impl*, std::string>, std::vector<std::string>> flattened_;
};

/// The ranks of a submesh over the dimensions `dims` that contains `coordinate`, row-major in the
/// order of `dims`. The whole mesh has `shape` and `ranks`.
std::vector<int> ranks_through(const std::vector<int>& ranks, const MeshShape& shape,
                               std::vector<std::int64_t> coordinate, const std::vector<int>& dims);

/// The ranks of the product of `parts`, row-major in their order. `parts` are lists of ranks of
/// `root`, each of which contains `own`. The product has the ranks that are reached from `own` by
/// one step within each list. Empty if the lists do not form a product: if a step leaves the root,
/// or two paths lead to one rank.
std::vector<int> product_through(const std::vector<int>& root,
                                 const std::vector<std::vector<int>>& parts, int own);

}  // namespace tessera
