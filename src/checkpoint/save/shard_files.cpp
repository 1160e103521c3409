#include "save/shard_files.h"

#include <ATen/ops/empty.h>

#include <map>
#include <optional>
#include <utility>

#include "blocks/blocks.h"
#include "save/host_memory.h"
#include "tessera/comm/streams.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::checkpoint {
namespace {

FileChunk chunk_of(const PlannedChunk& planned, const StateEntry& entry) {
  const at::Tensor local = local_tensor(entry.tensor).detach();
  FileChunk chunk{.tensor = entry.stored.name,
                  .dtype = entry.tensor.scalar_type(),
                  .offset = planned.offset,
                  .sizes = planned.sizes,
                  .blocks = {}};
  for (const ChunkRows& part : planned.parts) {
    chunk.blocks.push_back({part.row, local_block(local, Box{{}, part.local_offset, part.sizes})});
  }
  return chunk;
}

/// For what is in the host's memory, or on a device that is no GPU.
HostMemory memory_for_copies(const std::vector<ShardFile>& files) {
  std::int64_t bytes = 0;
  for (const ShardFile& file : files) {
    for (const FileChunk& chunk : file.chunks) {
      for (const RowBlock& block : chunk.blocks) {
        if (!block.values.is_cuda()) {
          bytes += HostMemory::rounded(block.values.numel() *
                                       static_cast<std::int64_t>(c10::elementSize(chunk.dtype)));
        }
      }
    }
  }
  return HostMemory(bytes);
}

}  // namespace

std::vector<ShardFile> shard_files(const SavePlan& plan, const std::vector<StateEntry>& entries,
                                   int rank) {
  std::map<std::string, std::vector<FileChunk>> by_name;
  for (const PlannedChunk& planned : plan.chunks) {
    if (planned.rank == rank) {
      by_name[plan.file_name(planned)].push_back(chunk_of(planned, entries[planned.entry]));
    }
  }
  std::vector<ShardFile> files;
  for (auto& [name, chunks] : by_name) {
    files.push_back({name, std::move(chunks)});
  }
  return files;
}

void copy_to_host(std::vector<ShardFile>& files) {
  HostMemory memory = memory_for_copies(files);
  std::optional<c10::Device> device;
  for (ShardFile& file : files) {
    for (FileChunk& chunk : file.chunks) {
      for (RowBlock& block : chunk.blocks) {
        const bool pinned = block.values.is_cuda();
        const at::Tensor host =
            pinned ? at::empty(block.values.sizes(), at::dtype(chunk.dtype).pinned_memory(true))
                   : memory.take(block.values.sizes(), chunk.dtype);
        host.copy_(block.values, /*non_blocking=*/pinned);
        if (pinned) {
          device = block.values.device();
        }
        block.values = host;
      }
    }
  }
  if (device) {
    const comm::StreamsPtr streams = comm::make_streams(*device);
    streams->synchronize(streams->record(comm::Lane::kCompute));
  }
}

}  // namespace tessera::checkpoint
