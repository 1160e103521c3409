#include <ATen/ops/empty.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <numeric>
#include <system_error>

#include "format.h"
#include "ranks.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/agreement.h"
#include "tessera/comm/detail/worlds.h"
#include "tessera/comm/world.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::checkpoint {
namespace {

/// The reason why a read of a saved step failed, if a file of the step is damaged or missing.
struct Proof {
  bool damaged = false;
  std::string missing;
};

void read(const std::function<void()>& work, Proof& proof) {
  try {
    work();
  } catch (const tessera::detail::ReadError& error) {
    proof.missing = error.missing().string();
    throw;
  } catch (const Error&) {
    proof.damaged = true;
    throw;
  }
}

bool is_gone(const std::string& file) {
  std::error_code error;
  return std::filesystem::symlink_status(file, error).type() ==
         std::filesystem::file_type::not_found;
}

using Sizes = std::vector<std::int64_t>;

/// A rank that sends its shard of a tensor to rank 0. If several ranks have the same shard, only
/// the first of these ranks sends the shard.
struct PartHolder {
  std::size_t index;  ///< index of the rank in DeviceMesh::ranks()
  Sizes coordinate;
  Sizes local_sizes;

  std::int64_t rows() const { return local_sizes.empty() ? 1 : local_sizes[0]; }
  std::int64_t row_elements() const {
    return local_sizes.empty() ? 1 : product(std::span(local_sizes).subspan(1));
  }
};

/// Returns one rank for each shard: the rank whose coordinate is 0 in every mesh dimension that
/// replicates the tensor. Every rank computes the list without communication.
std::vector<PartHolder> parts_of(const ShardingSpec& spec, std::span<const std::int64_t> sizes) {
  const auto& shape = spec.mesh.shape();
  std::vector<PartHolder> parts;
  for (std::int64_t index = 0; index < shape.numel(); ++index) {
    auto coordinate = shape.coordinate(index);
    bool replica = false;
    for (int dim = 0; dim < shape.ndim(); ++dim) {
      replica |= spec.layout->sharded_dim(dim) < 0 && coordinate[static_cast<std::size_t>(dim)] > 0;
    }
    if (replica) {
      continue;
    }
    auto local = local_sizes(*spec.layout, sizes, coordinate);
    parts.push_back({static_cast<std::size_t>(index), std::move(coordinate), std::move(local)});
  }
  return parts;
}

/// Returns the overlap, possibly empty, of `box` and the local rows [begin, end). The local offset
/// of the result is relative to row `begin`.
Box clipped(Box box, std::int64_t begin, std::int64_t end) {
  if (box.sizes.empty()) {
    return box;
  }
  const auto first = std::max(begin, box.local_offset[0]);
  const auto last = std::max(first, std::min(end, box.local_offset[0] + box.sizes[0]));
  box.global_offset[0] += first - box.local_offset[0];
  box.local_offset[0] = first - begin;
  box.sizes[0] = last - first;
  return box;
}

class Gather {
 public:
  // A rank of a submesh without rank 0 sends nothing, because the submesh with rank 0 has the same
  // values.
  Gather(const at::Tensor& tensor, c10::ScalarType dtype, comm::Communicator& world,
         c10::DeviceType device, const BlockVisitor& visit)
      : tensor_(tensor),
        spec_(sharding_spec(tensor)),
        sizes_(tensor.sizes().vec()),
        dtype_(dtype),
        world_(world),
        device_(device),
        visit_(visit),
        parts_(parts_of(spec_, sizes_)) {
    const auto& ranks = spec_.mesh.ranks();
    const bool with_root = std::find(ranks.begin(), ranks.end(), 0) != ranks.end();
    for (std::size_t i = 0; with_root && i < parts_.size(); ++i) {
      if (ranks[parts_[i].index] == world.rank()) {
        mine_ = &parts_[i];
      }
    }
  }

  // Sends the tensor in rounds. A round transfers some rows of every rank's shard. The largest
  // shard determines the number of rounds.
  void run(std::int64_t round_elements) {
    std::int64_t rows = 0, row_elements = 1;
    for (const auto& part : parts_) {
      rows = std::max(rows, part.rows());
      row_elements = std::max(row_elements, part.row_elements());
    }
    const auto count = static_cast<std::int64_t>(parts_.size());
    // Rank 0 receives from all ranks at once, so `round_elements` limits the sum over all ranks.
    const auto step = std::max<std::int64_t>(1, round_elements / (row_elements * count));
    for (std::int64_t begin = 0; begin < rows; begin += step) {
      round(begin, begin + step);
    }
  }

 private:
  /// Sends the local rows [begin, end) of every rank's shard to rank 0.
  void round(std::int64_t begin, std::int64_t end) {
    // Every rank of the world takes part in the all-to-all, even if the rank has nothing to send.
    const at::Tensor sent = mine_ == nullptr ? at::empty({0}, options()) : rows_of(begin, end);
    std::vector<std::int64_t> out(static_cast<std::size_t>(world_.size()), 0), in = out;
    out[0] = sent.numel();
    if (world_.rank() == 0) {
      for (const auto& part : parts_) {
        in[rank_of(part)] = elements(part, begin, end);
      }
    }
    const auto received =
        at::empty({std::accumulate(in.begin(), in.end(), std::int64_t{0})}, options());
    world_.all_to_all(received, sent, in, out)->wait();
    if (world_.rank() == 0) {
      deliver(received.cpu(), in, begin, end);
    }
  }

  // Passes the received blocks to the visitor. `received` is in the order of world ranks, which can
  // differ from the order of the mesh.
  void deliver(const at::Tensor& received, const std::vector<std::int64_t>& counts,
               std::int64_t begin, std::int64_t end) {
    for (const auto& part : parts_) {
      const auto rank = static_cast<std::ptrdiff_t>(rank_of(part));
      const auto first = std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0});
      const auto local = received.narrow(0, first, elements(part, begin, end))
                             .view(clipped_sizes(part, begin, end));
      for (const auto& box : owned_boxes(*spec_.layout, sizes_, part.coordinate)) {
        const auto piece = clipped(box, begin, end);
        if (product(piece.sizes) > 0) {
          visit_(piece.global_offset, local_block(local, piece));
        }
      }
    }
  }

  Sizes clipped_sizes(const PartHolder& part, std::int64_t begin, std::int64_t end) const {
    Sizes sizes = part.local_sizes;
    if (!sizes.empty()) {
      sizes[0] = std::clamp<std::int64_t>(sizes[0] - begin, 0, end - begin);
    }
    return sizes;
  }
  std::int64_t elements(const PartHolder& part, std::int64_t begin, std::int64_t end) const {
    return product(clipped_sizes(part, begin, end));
  }

  // The sending ranks convert the dtype, so that rank 0 need not convert the whole tensor.
  at::Tensor rows_of(std::int64_t begin, std::int64_t end) const {
    at::Tensor local = local_tensor(tensor_).detach();
    if (local.dim() > 0) {
      const auto first = std::min(begin, local.size(0));
      local = local.narrow(0, first, std::min(end, local.size(0)) - first);
    }
    return local.to(device_, dtype_).contiguous().view({-1});
  }

  std::size_t rank_of(const PartHolder& part) const {
    return static_cast<std::size_t>(spec_.mesh.ranks()[part.index]);
  }
  at::TensorOptions options() const { return at::TensorOptions(dtype_).device(device_); }

  const at::Tensor& tensor_;
  const ShardingSpec& spec_;
  Sizes sizes_;
  c10::ScalarType dtype_;
  comm::Communicator& world_;
  c10::DeviceType device_;
  const BlockVisitor& visit_;
  std::vector<PartHolder> parts_;
  const PartHolder* mine_ = nullptr;  ///< this rank's shard; nullptr if this rank sends nothing
};

/// Whether every rank has the whole tensor.
bool is_whole(const at::Tensor& tensor) {
  return !tessera::is_distributed(tensor) || sharding_spec(tensor).layout->is_replicated();
}

}  // namespace

comm::CommunicatorPtr all_ranks(comm::World& world) {
  return world.group(comm::ranks_of_world(world.size()), "world");
}

comm::CommunicatorPtr hosts_of_saves(comm::World& world) {
  return world.host_group(comm::ranks_of_world(world.size()), "checkpoint");
}

void run_or_fail_on_all(comm::World& world, const std::function<void()>& work) {
  comm::run_or_fail_together(*all_ranks(world), c10::Device(world.options().device), work);
}

void run_or_fail_on_all(comm::Communicator& hosts, const std::function<void()>& work) {
  comm::run_or_fail_together(hosts, c10::kCPU, work);
}

void read_or_fail_on_all(comm::World& world, const std::function<void()>& work) {
  const auto group = all_ranks(world);
  const c10::Device device(world.options().device);
  Proof own;
  const auto failure = comm::first_failure(*group, device, [&] { read(work, own); });
  if (!failure) {
    return;
  }
  const bool first = group->rank() == failure->rank;
  const std::string missing =
      comm::broadcast_text(*group, device, failure->rank, first ? own.missing : "");
  const bool gone = group->rank() == 0 && !missing.empty() && is_gone(missing);
  std::uint8_t damaged = gone || (first && own.damaged) ? 1 : 0;
  group->any_rank({&damaged, 1});
  if (damaged != 0) {
    throw DamagedStep(failure->message);
  }
  throw Error(failure->message);
}

void check_gatherable(const at::Tensor& tensor, const std::string& name) {
  if (!tessera::is_distributed(tensor)) {
    return;
  }
  TESSERA_CHECK(!sharding_spec(tensor).layout->is_partial(), "parameter '", name,
                "' has a Partial placement (pending sum): redistribute the tensor before saving");
}

void gather_blocks(const at::Tensor& tensor, c10::ScalarType dtype, comm::Communicator& world,
                   c10::DeviceType device, const BlockVisitor& visit, std::int64_t round_elements) {
  // is_whole() returns the same value on every rank, so either all ranks call run() or none does.
  if (!is_whole(tensor)) {
    Gather(tensor, dtype, world, device, visit).run(round_elements);
  } else if (world.rank() == 0) {
    visit(Sizes(static_cast<std::size_t>(tensor.dim()), 0),
          local_tensor(tensor).detach().to(at::kCPU, dtype));
  }
}

}  // namespace tessera::checkpoint
