#pragma once

#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/world.h"
#include "tessera/core/mesh_shape.h"

namespace tessera {

/// An n-dimensional arrangement of ranks, with a communication group per dimension. A cheap value:
/// copies share one immutable object. Seen from one rank, which must be a member for anything that
/// communicates. PyTorch's DeviceMesh.
class DeviceMesh {
 public:
  /// No mesh; only assignable and comparable.
  DeviceMesh() = default;
  /// `ranks`: world ranks in row-major order of `shape`, all different.
  DeviceMesh(comm::WorldPtr world, std::vector<int> ranks, MeshShape shape);

  explicit operator bool() const { return impl_ != nullptr; }
  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b) { return a.impl_ == b.impl_; }
  /// Identity of the shared object: equal for the same submesh of the same mesh.
  const void* id() const { return impl_.get(); }

  const MeshShape& shape() const;
  int ndim() const;
  /// Number of ranks, or of one dimension.
  std::int64_t size() const;
  std::int64_t size(int dim) const;
  std::int64_t size(std::string_view name) const;
  const std::vector<int>& ranks() const;
  const comm::WorldPtr& world() const;
  /// "cpu" or "cuda".
  const std::string& device_type() const;

  /// This rank's coordinate; empty if it is not a member.
  const std::vector<std::int64_t>& coordinate() const;
  bool contains_this_rank() const { return !coordinate().empty(); }
  /// This rank's index along a dimension.
  std::int64_t local_rank(int dim) const;
  std::int64_t local_rank(std::string_view name) const;
  std::int64_t local_rank() const;  ///< of a 1-D mesh

  /// The submesh of the named dimensions through this rank, in the mesh's order. The same names
  /// give the same object. Throws Error for an unknown or repeated name or another order.
  DeviceMesh operator[](std::string_view name) const;
  DeviceMesh operator[](std::initializer_list<std::string_view> names) const;
  DeviceMesh slice(const std::vector<std::string>& names) const;
  /// The mesh that this one was sliced or flattened from (itself, if from none).
  DeviceMesh root() const;
  /// All dimensions as one, called `name` (default: the names joined by "_"). Cached.
  DeviceMesh flatten(const std::string& name = "") const;

  /// The group of a dimension. Made at first use: collective over that group's ranks.
  comm::Communicator& group(int dim) const;
  comm::Communicator& group(std::string_view name) const;
  comm::Communicator& group() const;  ///< of a 1-D mesh
  /// The group of several dimensions at once, in row-major order of `dims`.
  comm::Communicator& group(const std::vector<int>& dims) const;

 private:
  struct Impl;
  class Family;
  explicit DeviceMesh(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  const Impl& impl() const;
  DeviceMesh relative(std::vector<int> ranks, MeshShape shape) const;
  std::shared_ptr<const Impl> impl_;
};

/// A mesh over all ranks of `world`, row-major: rank order = coordinates, last dimension fastest.
/// Throws Error if the sizes don't multiply to the world size. Not collective: groups are made at
/// first use.
DeviceMesh init_device_mesh(comm::WorldPtr world, std::vector<std::int64_t> sizes,
                            std::vector<std::string> names);

/// "DeviceMesh((dp=2, tp=2), cpu)".
std::string to_string(const DeviceMesh& mesh);

}  // namespace tessera
