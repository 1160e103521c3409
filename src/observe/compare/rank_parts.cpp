#include "compare/rank_parts.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::observe {
namespace {

/// Type, sizes, then the values. For an undefined tensor only a type that no tensor has.
std::string to_bytes(const at::Tensor& tensor) {
  std::vector<std::int64_t> header{-1};
  at::Tensor values;
  if (tensor.defined()) {
    values = tensor.cpu().contiguous();
    header = {static_cast<std::int64_t>(values.scalar_type()), values.dim()};
    header.insert(header.end(), values.sizes().begin(), values.sizes().end());
  }
  std::string bytes(reinterpret_cast<const char*>(header.data()), header.size() * sizeof header[0]);
  if (values.defined()) {
    bytes.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  }
  return bytes;
}

at::Tensor from_bytes(const std::string& bytes) {
  const auto number = [&](std::size_t index) {
    std::int64_t value = 0;
    std::memcpy(&value, bytes.data() + index * sizeof value, sizeof value);
    return value;
  };
  if (number(0) < 0) {
    return {};
  }
  std::vector<std::int64_t> sizes;
  for (std::int64_t dim = 0; dim < number(1); ++dim) {
    sizes.push_back(number(static_cast<std::size_t>(2 + dim)));
  }
  at::Tensor tensor = at::empty(sizes, static_cast<at::ScalarType>(number(0)));
  if (tensor.numel() > 0) {
    const std::size_t header = bytes.size() - tensor.nbytes();
    std::memcpy(tensor.mutable_data_ptr(), bytes.data() + header, tensor.nbytes());
  }
  return tensor;
}

/// nullopt: they do not fit together.
std::optional<at::Tensor> joined(const std::vector<at::Tensor>& tensors, std::int64_t dim) {
  std::vector<std::int64_t> like = tensors.front().sizes().vec();
  for (const at::Tensor& tensor : tensors) {
    std::vector<std::int64_t> sizes = tensor.sizes().vec();
    if (sizes.size() != like.size()) {
      return std::nullopt;
    }
    sizes[static_cast<std::size_t>(dim)] = like[static_cast<std::size_t>(dim)];
    if (sizes != like) {
      return std::nullopt;
    }
  }
  return at::cat(tensors, dim);
}

std::vector<at::Tensor> tensors_of(const Reading& reading) {
  std::vector<at::Tensor> tensors;
  for (const Whole& whole : reading) {
    tensors.push_back(whole.tensor);
  }
  return tensors;
}

/// The ways to read the tensors of the ranks of one part of the batch.
std::vector<Reading> ways_within_a_batch(const Reading& copies) {
  std::vector<Reading> ways{copies};
  const std::int64_t dims = copies.size() > 1 ? copies.front().tensor.dim() : 0;
  for (std::int64_t dim = 0; dim < dims; ++dim) {
    const std::optional<at::Tensor> whole = joined(tensors_of(copies), dim);
    // An empty reading: the ways of all parts are numbered alike.
    ways.push_back(whole ? Reading{{*whole, ""}} : Reading{});
  }
  return ways;
}

/// Sample by sample, or the mean of numbers that are means over a part's samples each.
std::optional<at::Tensor> over_batches(const std::vector<at::Tensor>& tensors) {
  if (tensors.front().dim() > 0) {
    return joined(tensors, 0);
  }
  const bool real = std::ranges::all_of(
      tensors, [](const at::Tensor& t) { return t.dim() == 0 && t.is_floating_point(); });
  return real ? std::optional(at::stack(tensors).mean()) : std::nullopt;
}

/// The k-th copies of all parts of the batch, joined. Empty if there is one that does not join.
Reading join_batches(const std::vector<Reading>& parts) {
  Reading whole;
  for (std::size_t k = 0; k < parts.front().size(); ++k) {
    std::vector<at::Tensor> column;
    for (const Reading& part : parts) {
      column.push_back(part[k].tensor);
    }
    const std::optional<at::Tensor> joined = over_batches(column);
    if (!joined) {
      return {};
    }
    whole.push_back({*joined, ""});
  }
  return whole;
}

Reading all_of(const std::vector<Reading>& parts) {
  Reading all;
  for (const Reading& part : parts) {
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

/// The only dimension in which sizes differ; -1 if there is none or several.
std::int64_t other_dim(at::IntArrayRef sizes, at::IntArrayRef others) {
  std::int64_t found = -1;
  for (std::size_t dim = 0; sizes.size() == others.size() && dim < sizes.size(); ++dim) {
    if (sizes[dim] == others[dim]) {
      continue;
    }
    if (found >= 0) {
      return -1;
    }
    found = static_cast<std::int64_t>(dim);
  }
  return found;
}

}  // namespace

BatchGrid::BatchGrid(const DeviceMesh& mesh, const std::vector<std::string>& batch_dims) {
  const MeshShape& shape = mesh.shape();
  std::vector<bool> of_batch(shape.sizes().size());
  for (const std::string& name : batch_dims) {
    of_batch[static_cast<std::size_t>(shape.dim(name))] = true;
    batches *= mesh.size(name);
  }
  std::vector<std::pair<std::vector<std::int64_t>, std::size_t>> order;
  for (std::int64_t position = 0; position < shape.numel(); ++position) {
    // Coordinates on the dimensions of the batch first, then the others.
    const std::vector<std::int64_t> coordinate = shape.coordinate(position);
    std::vector<std::int64_t> key;
    for (const bool wanted : {true, false}) {
      for (std::size_t dim = 0; dim < coordinate.size(); ++dim) {
        if (of_batch[dim] == wanted) {
          key.push_back(coordinate[dim]);
        }
      }
    }
    order.emplace_back(std::move(key), static_cast<std::size_t>(position));
  }
  std::ranges::sort(order);
  for (const auto& [key, position] : order) {
    positions.push_back(position);
  }
}

RankParts gather_parts(const at::Tensor& own, const DeviceMesh& mesh, const BatchGrid& grid,
                       bool of_batch) {
  comm::Communicator& group = flush_pending_transfers(mesh.group_of_all_ranks());
  const std::vector<std::string> all = comm::gather_texts(group, mesh.device(), to_bytes(own));
  RankParts parts{of_batch ? grid.batches : 1, {}, {}};
  for (const std::size_t position : grid.positions) {
    parts.ranks.push_back(std::to_string(mesh.ranks()[position]));
    parts.tensors.push_back(from_bytes(all[position]));
  }
  return parts;
}

std::vector<Reading> readings(const RankParts& parts) {
  const auto batches = static_cast<std::size_t>(parts.batches);
  const std::size_t each = parts.tensors.size() / batches;
  std::vector<std::vector<Reading>> ways;  // of each part of the batch
  for (std::size_t batch = 0; batch < batches; ++batch) {
    Reading copies;
    for (std::size_t i = batch * each; i < (batch + 1) * each; ++i) {
      copies.push_back({parts.tensors[i], parts.ranks[i]});
    }
    ways.push_back(ways_within_a_batch(copies));
  }
  std::vector<Reading> found;
  for (std::size_t way = 0; way < ways.front().size(); ++way) {
    std::vector<Reading> alike;
    for (const std::vector<Reading>& part : ways) {
      if (way < part.size() && !part[way].empty()) {
        alike.push_back(part[way]);
      }
    }
    if (alike.size() < batches) {
      continue;
    }
    found.push_back(all_of(alike));
    if (Reading whole = batches > 1 ? join_batches(alike) : Reading{}; !whole.empty()) {
      found.push_back(std::move(whole));
    }
  }
  return found;
}

at::Tensor copies_of_heads(const at::Tensor& tensor, at::IntArrayRef shard, at::IntArrayRef sizes) {
  const std::int64_t dim = shard.size() == sizes.size() ? other_dim(tensor.sizes(), sizes) : -1;
  if (dim < 0) {
    return {};
  }
  const auto place = static_cast<std::size_t>(dim);
  const std::int64_t head = shard[place], once = sizes[place];
  if (head == 0 || once == 0 || once % head != 0 || tensor.size(dim) % once != 0) {
    return {};
  }
  return tensor.unflatten(dim, {once / head, tensor.size(dim) / once, head})
      .movedim(dim + 1, 0)
      .flatten(dim + 1, dim + 2);
}

std::string layout_of(const at::Tensor& tensor) {
  const std::string sizes = fmt::format("[{}]", fmt::join(tensor.sizes(), ", "));
  if (!tessera::is_distributed(tensor)) {
    return sizes + ", plain";
  }
  const ShardingSpec& spec = sharding_spec(tensor);
  std::string placements;
  try {
    placements = to_string(to_placements(*spec.layout, tensor.sizes()));
  } catch (const Error&) {  // a layout that no list of placements describes
    placements = to_string(*spec.layout);
  }
  return fmt::format("{} on {} as {}", sizes, to_string(spec.mesh.shape()), placements);
}

}  // namespace tessera::observe
