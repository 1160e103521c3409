#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/world.h"
#include "tessera/core/mesh_shape.h"
#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera {

/// An n-dimensional arrangement of ranks with a process group for each dimension, like PyTorch's
/// DeviceMesh. Copies share one immutable object. Thread safe.
///
/// On ranks outside of the mesh, coordinate() is empty, and groups, slices and tensors on the mesh
/// throw Error. A dimension index may be negative and then counts from the end. A name is a
/// dimension's name or a name given to flatten(). Throws Error for other indices and names.
class DeviceMesh {
 public:
  /// Constructs a DeviceMesh without ranks, which can only be assigned to and compared.
  DeviceMesh() = default;
  /// Makes a mesh of the world ranks `ranks`, in row-major order of `shape`. Not collective.
  DeviceMesh(comm::WorldPtr world, std::vector<int> ranks, MeshShape shape);

  /// Makes a mesh from the caller's process groups, one for each dimension. This rank's rank in a
  /// group must equal its coordinate in the dimension. Not collective. Throws Error for other sizes
  /// or ranks, and if an equal mesh already has another process group.
  static DeviceMesh from_groups(comm::WorldPtr world, std::vector<int> ranks, MeshShape shape,
                                const std::vector<comm::CommunicatorPtr>& groups);

  explicit operator bool() const { return impl_ != nullptr; }
  friend bool operator==(const DeviceMesh& a, const DeviceMesh& b) { return a.impl_ == b.impl_; }
  /// Returns an address. Copies of a mesh have equal addresses, and so have equal meshes of one
  /// world and equal slices of one mesh.
  const void* id() const { return impl_.get(); }

  const MeshShape& shape() const;
  int ndim() const;
  /// Returns the number of ranks in the mesh.
  std::int64_t size() const;
  std::int64_t size(int dim) const;
  std::int64_t size(std::string_view name) const;
  const std::vector<int>& ranks() const;
  const comm::WorldPtr& world() const;
  /// Returns the type of the mesh's devices: "cpu" or "cuda".
  const std::string& device_type() const;
  /// Returns the device of this rank's tensors, such as "cuda:0"; the same on all threads.
  c10::Device device() const;

  /// Returns this rank's coordinate in the mesh; empty if this rank is not a member of the mesh.
  const std::vector<std::int64_t>& coordinate() const;
  bool contains_this_rank() const { return !coordinate().empty(); }
  /// Returns this rank's index along mesh dimension `dim`.
  std::int64_t local_rank(int dim) const;
  std::int64_t local_rank(std::string_view name) const;
  /// Returns this rank's index in a 1-D mesh; throws Error for a mesh with more dimensions.
  std::int64_t local_rank() const;

  /// Returns the submesh that has the named dimensions and contains this rank. A name given to
  /// flatten() counts as a dimension. Not collective. Throws Error for unknown, repeated or wrongly
  /// ordered names, or if this rank is not a member.
  DeviceMesh operator[](std::string_view name) const;
  DeviceMesh operator[](std::initializer_list<std::string_view> names) const;
  DeviceMesh slice(const std::vector<std::string>& names) const;
  /// Returns the mesh from which this mesh was made by slicing and reshaping, or this mesh itself
  /// if this mesh was not made from another mesh.
  DeviceMesh root() const;
  /// Returns the mesh with all dimensions merged into one dimension, called `name` (default: the
  /// dimensions' names joined by "_"). Not collective.
  DeviceMesh flatten(const std::string& name = "") const;
  /// Returns the mesh with dimension `name` divided into several dimensions, outermost first.
  /// Throws Error unless the sizes multiply to the dimension's size. Not collective.
  DeviceMesh unflatten(std::string_view name, const std::vector<std::int64_t>& sizes,
                       const std::vector<std::string>& names) const;
  /// Returns the submesh that has the dimensions of all of `meshes`, in this order, and contains
  /// this rank. `meshes` must have the same root(). Not collective. Throws Error if two of `meshes`
  /// share a dimension.
  static DeviceMesh concatenate(const std::vector<DeviceMesh>& meshes);

  /// Returns the process group of a mesh dimension. The first call makes the process group, which
  /// is collective over the ranks of the process group.
  comm::Communicator& group(int dim) const;
  comm::Communicator& group(std::string_view name) const;
  /// Returns the process group of a 1-D mesh; throws Error for a mesh with more dimensions.
  comm::Communicator& group() const;
  /// Returns the process group over several mesh dimensions; ranks are in row-major order of
  /// `dims`.
  comm::Communicator& group(const std::vector<int>& dims) const;
  /// Returns the process group of all ranks of the mesh; the ranks are in the order of ranks().
  comm::Communicator& group_of_all_ranks() const;

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

/// Makes a row-major mesh over all ranks of `world`. Not collective: process groups are made at
/// first use. Throws Error if the sizes do not multiply to the world size.
DeviceMesh init_device_mesh(comm::WorldPtr world, std::vector<std::int64_t> sizes,
                            std::vector<std::string> names);

/// Returns the mesh as text: "DeviceMesh((dp=2, tp=2), cpu)".
std::string to_string(const DeviceMesh& mesh);
/// Writes to_string(mesh).
std::ostream& operator<<(std::ostream& stream, const DeviceMesh& mesh);

}  // namespace tessera
TESSERA_API_END

template <>
struct std::hash<tessera::DeviceMesh> {
  std::size_t operator()(const tessera::DeviceMesh& mesh) const noexcept {
    return std::hash<const void*>()(mesh.id());
  }
};
