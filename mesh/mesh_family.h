#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

/// The immutable description of a mesh, and the groups made for it so far.
struct DeviceMesh::Impl {
  Impl(Family* family, const Impl* root, std::vector<int> ranks, MeshShape shape, int own_rank);

  Family* family;
  const Impl* root;
  std::vector<int> ranks;
  MeshShape shape;
  std::vector<std::int64_t> coordinate;

  /// Found again without a lock: this is asked for at every collective.
  mutable std::vector<std::atomic<comm::Communicator*>> dim_groups;
  mutable std::mutex mutex;
  mutable std::map<std::vector<int>, comm::CommunicatorPtr> groups;
};

/// All meshes of a world that are in use. Every handle keeps the whole family alive, so equal
/// meshes are one object for as long as anyone can compare them.
class DeviceMesh::Family : public std::enable_shared_from_this<Family> {
 public:
  /// The family of `world`: one at a time.
  static std::shared_ptr<Family> of(const comm::WorldPtr& world);

  explicit Family(comm::WorldPtr world) : world_(std::move(world)) {}
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;
  ~Family();

  const comm::WorldPtr& world() const { return world_; }
  std::shared_ptr<const Impl> handle(const Impl* impl) { return {shared_from_this(), impl}; }

  /// The one mesh with these ranks and this shape that comes from `root` (nullptr: from none).
  const Impl* member(const Impl* root, std::vector<int> ranks, MeshShape shape);

  /// Remembers that within `root` `name` is the flattening of `dims`, so that slicing finds it.
  void remember_flattened(const Impl* root, const std::string& name,
                          const std::vector<std::string>& dims);
  /// Those dimensions; empty if `name` is no flattening.
  std::vector<std::string> flattened_dims(const Impl* root, const std::string& name) const;

 private:
  using Key = std::tuple<const Impl*, std::vector<int>, std::vector<std::int64_t>,
                         std::vector<std::string>>;

  comm::WorldPtr world_;
  mutable std::mutex mutex_;
  std::map<Key, std::unique_ptr<Impl>> members_;
  std::map<std::pair<const Impl*, std::string>, std::vector<std::string>> flattened_;
};

}  // namespace tessera
