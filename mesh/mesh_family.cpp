// See mesh_family.h.
#include "mesh_family.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace tessera {
namespace {

/// By where the rank is in the list; empty if it is not.
std::vector<std::int64_t> coordinate_of(int rank, const std::vector<int>& ranks,
                                        const MeshShape& shape) {
  const auto self = std::ranges::find(ranks, rank);
  return self == ranks.end() ? std::vector<std::int64_t>{} : shape.coordinate(self - ranks.begin());
}

/// A template because DeviceMesh::Family is private: members name it, this file-local code cannot.
template <class T>
struct Registry {
  std::mutex mutex;
  std::map<const comm::World*, std::weak_ptr<T>> families;
};

/// Never destroyed: a mesh may outlive main().
template <class T>
Registry<T>& registry() {
  static auto* const families = new Registry<T>();
  return *families;
}

}  // namespace

DeviceMesh::Impl::Impl(Family* family, const Impl* root, std::vector<int> ranks, MeshShape shape,
                       int own_rank)
    : family(family),
      root(root == nullptr ? this : root),
      ranks(std::move(ranks)),
      shape(std::move(shape)),
      coordinate(coordinate_of(own_rank, this->ranks, this->shape)),
      dim_groups(static_cast<std::size_t>(this->shape.ndim())) {}

/// By the world's address. A family holds its world, so an address cannot come round again while
/// its entry has not expired.
std::shared_ptr<DeviceMesh::Family> DeviceMesh::Family::of(const comm::WorldPtr& world) {
  auto& [mutex, families] = registry<Family>();
  const std::lock_guard lock(mutex);
  std::weak_ptr<Family>& known = families[world.get()];
  std::shared_ptr<Family> family = known.lock();
  if (family == nullptr) {
    family = std::make_shared<Family>(world);
    known = family;
  }
  return family;
}

/// Runs when the last handle goes, on whichever thread that is.
DeviceMesh::Family::~Family() {
  auto& [mutex, families] = registry<Family>();
  const std::lock_guard lock(mutex);
  // Another family of the same world may have taken the place already.
  if (const auto entry = families.find(world_.get());
      entry != families.end() && entry->second.expired()) {
    families.erase(entry);
  }
}

/// Not collective: nothing is made but a description. Groups are made later, at their first use.
const DeviceMesh::Impl* DeviceMesh::Family::member(const Impl* root, std::vector<int> ranks,
                                                   MeshShape shape) {
  const std::lock_guard lock(mutex_);
  auto& slot = members_[{root, ranks, shape.sizes(), shape.names()}];
  if (slot == nullptr) {
    slot = std::make_unique<Impl>(this, root, std::move(ranks), std::move(shape), world_->rank());
  }
  return slot.get();
}

/// One name means one list of dimensions for all slices of a root. Dimensions that were flattened
/// before count as those that they consist of.
std::vector<std::string> DeviceMesh::Family::remember_flattened(
    const Impl* root, const std::string& name, const std::vector<std::string>& dims) {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> all;
  for (const std::string& dim : dims) {
    const auto inner = flattened_.find({root, dim});
    std::ranges::copy(inner == flattened_.end() ? std::vector{dim} : inner->second,
                      std::back_inserter(all));
  }
  const auto known = flattened_.emplace(std::pair(root, name), all).first;
  return known->second == all ? std::vector<std::string>{} : known->second;
}

std::vector<std::string> DeviceMesh::Family::flattened_dims(const Impl* root,
                                                            const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const auto known = flattened_.find({root, name});
  return known == flattened_.end() ? std::vector<std::string>{} : known->second;
}

}  // namespace tessera
