// Meshes of one world share a family, which owns the descriptions of all these meshes, so that
// slices and roots may point to each other. Equal meshes are one object, so that comparing meshes
// compares pointers; dtensor compares meshes in each operator.

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

/// The immutable description of a mesh, and the process groups that were made for it so far.
struct DeviceMesh::Impl {
  Impl(Family* family, const Impl* root, std::vector<int> ranks, MeshShape shape, int own_rank);

  // A plain pointer, because every handle of a mesh owns the family, and the family owns this
  // object.
  Family* family;
  const Impl* root;
  // World ranks of the mesh, in row-major order of `shape`.
  std::vector<int> ranks;
  MeshShape shape;
  // This rank's coordinate; empty if this rank is not a member of the mesh.
  std::vector<std::int64_t> coordinate;

  /// The groups of single dimensions. They are found without a lock, because every collective looks
  /// one up.
  mutable std::vector<std::atomic<comm::Communicator*>> dim_groups;
  // Protects `groups`; the elements of dim_groups are atomic. Keys of `groups` are lists of
  // dimensions, because their order decides the order of the ranks.
  mutable std::mutex mutex;
  mutable std::map<std::vector<int>, comm::CommunicatorPtr> groups;
};

/// All meshes of a world, interned: equal meshes are one object. Every handle owns the family, so
/// the family lives as long as any mesh. Thread safe.
class DeviceMesh::Family : public std::enable_shared_from_this<Family> {
 public:
  /// The family of `world`; a world has at most one family at a time. The family is destroyed with
  /// its last mesh.
  static std::shared_ptr<Family> of(const comm::WorldPtr& world);

  explicit Family(comm::WorldPtr world) : world_(std::move(world)) {}
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;
  ~Family();

  const comm::WorldPtr& world() const { return world_; }
  std::shared_ptr<const Impl> handle(const Impl* impl) { return {shared_from_this(), impl}; }

  /// The unique mesh with these ranks and this shape that was made from `root`; a `root` of nullptr
  /// means that the mesh was not made from another mesh.
  const Impl* member(const Impl* root, std::vector<int> ranks, MeshShape shape);

  /// The dimensions of the root that have the ranks of `mesh` in the same order. If there are none,
  /// the dimensions of `mesh` itself, which unflatten() may have made.
  static std::vector<std::string> dims_of_root(const Impl& mesh);
  /// Records that `name` is the flattening of the dimensions `dims` of `root`, so that slicing
  /// finds it. Returns the dimensions for which the name stands: other dimensions than `dims` if
  /// the name was recorded before.
  std::vector<std::string> remember_flattened(const Impl* root, const std::string& name,
                                              const std::vector<std::string>& dims);
  /// The dimensions that were flattened to `name`; empty if there was no such flattening.
  std::vector<std::string> flattened_dims(const Impl* root, const std::string& name) const;

 private:
  using Key = std::tuple<const Impl*, std::vector<int>, std::vector<std::int64_t>,
                         std::vector<std::string>>;

  comm::WorldPtr world_;
  mutable std::mutex mutex_;
  // All meshes of the family. Entries are never removed while the family exists, because a program
  // has few meshes. The root is part of the key, because equal slices of different roots are
  // different meshes.
  std::map<Key, std::unique_ptr<Impl>> members_;
  // Dimensions for which a flattened name stands. Keys are root and name.
  std::map<std::pair<const Impl*, std::string>, std::vector<std::string>> flattened_;
};

/// The ranks of the submesh that has the dimensions `dims` and contains `coordinate`, row-major in
/// the order of `dims`. The whole mesh has `shape` and `ranks`.
std::vector<int> ranks_through(const std::vector<int>& ranks, const MeshShape& shape,
                               std::vector<std::int64_t> coordinate, const std::vector<int>& dims);

/// The ranks of the product of `parts`, row-major in their order. `parts` are lists of ranks of
/// `root`, each of which contains `own`. The product has the ranks that are reached from `own` by a
/// move within each list. Empty if the lists do not form a product: if a move leads out of the
/// root, or two sequences of moves lead to one rank.
std::vector<int> product_through(const std::vector<int>& root,
                                 const std::vector<std::vector<int>>& parts, int own);

}  // namespace tessera
