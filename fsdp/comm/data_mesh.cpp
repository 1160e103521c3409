// Decides which dimension of the caller's mesh shards, which replicates, and over which ranks
// gathered pieces are kept. All other code reads this struct instead of dimensions by position.

#include "comm/data_mesh.h"

#include <utility>

#include "tessera/core/error.h"

namespace tessera::fsdp {

DataMesh::DataMesh(const DeviceMesh& mesh) : all(mesh) {
  TESSERA_CHECK(mesh && (mesh.ndim() == 1 || mesh.ndim() == 2), "fully_shard: the mesh is ",
                mesh ? to_string(mesh) : "undefined",
                "; pass the dimension that shards, or those that replicate and shard, for example "
                "mesh[\"dp\"] or mesh[{\"dp_replicate\", \"dp\"}]");
  if (mesh.ndim() == 1) {
    shard = mesh;
    return;
  }
  const std::vector<std::string>& names = mesh.shape().names();
  // mesh[name] is the way to a dimension's slice, which keeps the root that tensor parallelism
  // shares.
  TESSERA_CHECK(!names.empty(), "fully_shard: the dimensions of ", to_string(mesh),
                " have no names; name them, so that they can be told apart");
  replicate = mesh[names[0]];
  shard = mesh[names[1]];
}

DataMesh DataMesh::sharding_over_replicas(const DeviceMesh& mesh) {
  TESSERA_CHECK(mesh && mesh.ndim() == 2, "fully_shard: shard_over_replicas was asked for on ",
                mesh ? to_string(mesh) : "no mesh",
                ", which has no dimension of replicas; pass two dimensions, for example "
                "mesh[{\"dp_replicate\", \"dp\"}], or leave the option out");
  DataMesh result(mesh);
  // The replica's own dimension keeps pieces; all ranks, as one dimension, shard.
  result.replica = std::exchange(result.shard, mesh.flatten());
  result.replicate = {};
  return result;
}

DataMesh DataMesh::replicating(const DeviceMesh& mesh) {
  TESSERA_CHECK(mesh && mesh.ndim() == 1, "replicate: the mesh is ",
                mesh ? to_string(mesh) : "undefined",
                "; pass the dimension that replicates, for example mesh[\"dp\"]");
  DataMesh result;
  result.all = result.replicate = mesh;
  const auto rank = static_cast<std::size_t>(mesh.local_rank());
  // This rank alone: nothing is gathered, nothing scattered.
  result.shard = DeviceMesh(mesh.world(), {mesh.ranks()[rank]}, MeshShape({1}));
  return result;
}

std::vector<DeviceMesh> DataMesh::data_dims() const {
  return replicate ? std::vector{replicate, shard} : std::vector{shard};
}

c10::Device DataMesh::device() const {
  return all.device();
}

bool is_slice(const DeviceMesh& part, const DeviceMesh& whole) {
  const std::vector<int>& all = whole.ranks();
  return part == whole || std::ranges::all_of(part.ranks(), [&](int rank) {
           return std::ranges::find(all, rank) != all.end();
         });
}

}  // namespace tessera::fsdp
