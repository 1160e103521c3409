#pragma once

#include <functional>
#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/world.h"
#include "tessera/core/mesh_shape.h"

namespace tessera {

/// An n-dimensional arrangement of ranks, with a communication group per dimension. A cheap value:
/// copies share one immutable object. Seen from one rank, which must be a member for anything that
/// communicates: on a rank outside, coordinate() is empty, and groups, slices and tensors on the
/// mesh throw Error. PyTorch's DeviceMesh.
///
/// Dimensions are numbered from 0 or, as in PyTorch, backwards from -1; a name is that of a
/// dimension or one given to flatten(). Error is thrown for others.
class DeviceMesh {
 public:
  /// No mesh; only assignable and comparable.
  DeviceMesh() = default;
  /// `ranks`: world ranks in row-major order of `shape`, all different. Not collective.
  DeviceMesh(comm::WorldPtr world, std::vector<int> ranks, MeshShape shape);

  /// The same with groups of the caller's own, one for each dimension, used instead of groups that
  /// the world would make: this rank's number in each must be its coordinate there. Throws Error
  /// if one does not fit, or if such a mesh has a group for the dimension already.
  static DeviceMesh from_groups(comm::WorldPtr world, std::vector<int> ranks, MeshShape shape,
                                const std::vector<comm::CommunicatorPtr>& groups);

  explicit operator bool() const { return impl_ != nullptr; }
  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b) { return a.impl_ == b.impl_; }
  /// Identity of the shared object. Equal for meshes of one world with the same ranks, sizes and
  /// names, and for the same submesh of equal meshes, however they were made.
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

  /// The submesh of the named dimensions through this rank, in the mesh's order; a name given to
  /// flatten() counts as a dimension. The same names give the same object. Throws Error for an
  /// unknown or repeated name, for another order, or if this rank is not a member.
  DeviceMesh operator[](std::string_view name) const;
  DeviceMesh operator[](std::initializer_list<std::string_view> names) const;
  DeviceMesh slice(const std::vector<std::string>& names) const;
  /// The mesh that this one was made from by slicing and reshaping (itself, if from none).
  DeviceMesh root() const;
  /// All dimensions as one, called `name` (default: the names joined by "_").
  DeviceMesh flatten(const std::string& name = "") const;
  /// Dimension `name` as several, outermost first. Throws Error unless the sizes multiply to its.
  DeviceMesh unflatten(std::string_view name, const std::vector<std::int64_t>& sizes,
                       const std::vector<std::string>& names) const;
  /// The dimensions of several submeshes of one root as one mesh, in the order given: the submesh
  /// through this rank that varies in all of them. Throws Error if two of them share a dimension.
  static DeviceMesh concatenate(const std::vector<DeviceMesh>& meshes);

  /// The group of a dimension. Made at first use: collective over that group's ranks.
  comm::Communicator& group(int dim) const;
  comm::Communicator& group(std::string_view name) const;
  comm::Communicator& group() const;  ///< of a 1-D mesh
  /// The group of several dimensions at once, in row-major order of `dims`.
  comm::Communicator& group(const std::vector<int>& dims) const;
  /// The groups of all dimensions, in order.
  std::vector<comm::Communicator*> all_groups() const;

 private:
  struct Impl;
  class Family;
  explicit DeviceMesh(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  const Impl& impl() const;
  DeviceMesh relative(std::vector<int> ranks, MeshShape shape) const;
  DeviceMesh slice_dims(const std::vector<std::string>& names) const;
  std::vector<int> dims_called(std::string_view name) const;
  void check_member(const char* wish) const;
  std::shared_ptr<const Impl> impl_;
};

/// A mesh over all ranks of `world`, row-major: rank order = coordinates, last dimension fastest.
/// Throws Error if the sizes don't multiply to the world size. Not collective: groups are made at
/// first use.
DeviceMesh init_device_mesh(comm::WorldPtr world, std::vector<std::int64_t> sizes,
                            std::vector<std::string> names);

/// "DeviceMesh((dp=2, tp=2), cpu)".
std::string to_string(const DeviceMesh& mesh);
std::ostream& operator<<(std::ostream& stream, const DeviceMesh& mesh);

}  // namespace tessera

template <>
struct std::hash<tessera::DeviceMesh> {
  std::size_t operator()(const tessera::DeviceMesh& mesh) const noexcept {
    return std::hash<const void*>()(mesh.id());
  }
};
