// The run of a rank is llama_train's own: whatever that does, its plan says.

#include "examples/llama/train/planned_run.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "tessera/core/layout_math.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace llama {

using namespace tessera;

namespace {

/// A world on paper is of the CPU, whatever it stands for.
TrainOptions on_paper(TrainOptions options) {
  options.device = "cpu";
  options.backend = "gloo";
  return options;
}

/// A rank's coordinate in a mesh of some of the root's dimensions, or of "dp_cp", which is two.
std::vector<std::int64_t> coordinate_in(const MeshShape& shape, const MeshShape& root,
                                        const std::vector<std::int64_t>& coordinate) {
  const auto along = [&](const char* name) {
    return coordinate[static_cast<std::size_t>(root.dim(name))];
  };
  std::vector<std::int64_t> result;
  for (const std::string& name : shape.names()) {
    result.push_back(name == "dp_cp" ? along("dp") * root.size(root.dim("cp")) + along("cp")
                                     : along(name.c_str()));
  }
  return result;
}

/// How many columns the masks of a rank's two chunks have in context parallelism, which say how
/// large they are (nn::ContextParallel).
std::int64_t keys_of_masks(std::int64_t sequence, std::int64_t ranks, std::int64_t rank,
                           std::int64_t window) {
  const std::int64_t length = sequence / (2 * ranks);
  std::int64_t keys = 0;
  for (const std::int64_t chunk : {rank, 2 * ranks - 1 - rank}) {
    const bool is_plain = chunk == 0 && (window == 0 || window >= length);
    const std::int64_t seen = (chunk + 1) * length;
    const std::int64_t in_window = window > 0 ? std::min(seen, length + window - 1) : seen;
    keys += is_plain ? 0 : in_window;
  }
  return keys;
}

}  // namespace

PlannedRun::PlannedRun(const TrainOptions& options, const comm::WorldPtr& world, ApplyPlan apply)
    : run_(on_paper(options), world, /*loads=*/false, apply) {
  for (const std::vector<nn::ModuleBase*>& modules : run_.model->fsdp_units()) {
    units_.push_back(modules.front());
  }
}

observe::StepMetrics PlannedRun::step() {
  const StrictScope strict;
  return run_.step();
}

/// To ask the whole model is to ask all of its modules: the unit that ran last mostly runs still,
/// and otherwise one beside it does.
std::string PlannedRun::under_way() {
  const auto begin = static_cast<std::ptrdiff_t>(unit_);
  const auto count = std::ssize(units_);
  for (std::ptrdiff_t distance = 0; distance < count; ++distance) {
    for (const std::ptrdiff_t unit : {begin + distance, begin - distance}) {
      if (unit < 0 || unit + 1 >= count) {
        continue;
      }
      if (std::string text = fsdp::under_way(*units_[static_cast<std::size_t>(unit)]);
          !text.empty()) {
        unit_ = static_cast<std::size_t>(unit);
        return text;
      }
    }
  }
  return fsdp::under_way(*units_.back());
}

std::vector<RankKind> PlannedRun::kinds() const {
  std::map<std::vector<std::int64_t>, RankKind> by_sizes;
  const MeshShape& root = run_.mesh.shape();
  const std::vector<Place> all = places();
  for (int rank = 0; rank < root.numel(); ++rank) {
    const auto [kind, is_new] = by_sizes.try_emplace(sizes_of(all, root.coordinate(rank)));
    kind->second.first = is_new ? rank : kind->second.first;
    ++kind->second.count;
  }
  std::vector<RankKind> kinds;
  for (const auto& [sizes, kind] : by_sizes) {
    kinds.push_back(kind);
  }
  std::ranges::sort(kinds, {}, &RankKind::first);
  return kinds;
}

/// Parameters that are laid out alike are so on all ranks: one of each sort.
std::vector<PlannedRun::Place> PlannedRun::places() const {
  std::vector<Place> places;
  std::set<std::pair<const void*, std::vector<std::int64_t>>> seen;
  for (const auto& [name, slot] : run_.model->named_slots()) {
    const at::Tensor& tensor = slot->persistent();
    const ShardingSpec& spec = sharding_spec(tensor);
    if (seen.emplace(&*spec.layout, tensor.sizes().vec()).second) {
      places.emplace_back(&spec, tensor.sizes().vec());
    }
  }
  return places;
}

std::vector<std::int64_t> PlannedRun::sizes_of(const std::vector<Place>& places,
                                               const std::vector<std::int64_t>& coordinate) const {
  const MeshShape& root = run_.mesh.shape();
  const TrainOptions& o = run_.options;
  const std::int64_t tokens = o.batch / (o.dp * o.dp_replicate * o.accumulate) * (o.seq / o.cp);
  std::vector<std::int64_t> sizes{chunk_size(tokens, o.tp, coordinate.back())};
  if (o.cp > 1) {
    sizes.push_back(keys_of_masks(o.seq, o.cp, coordinate[static_cast<std::size_t>(root.dim("cp"))],
                                  config().sliding_window));
  }
  for (const auto& [spec, global] : places) {
    sizes.push_back(
        local_numel(*spec->layout, global, coordinate_in(spec->mesh.shape(), root, coordinate)));
  }
  return sizes;
}

}  // namespace llama
