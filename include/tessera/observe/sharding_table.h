#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::nn {
class ModuleBase;
}

namespace tessera::observe {

/// How one parameter lies, seen from this rank.
struct ShardingRow {
  std::string name;
  std::vector<std::int64_t> sizes;  ///< global
  /// "dp: Shard(0), tp: Replicate()"; "-" for a plain tensor; the layout, as "[3:m0 x 2]", where
  /// placements cannot say it.
  std::string placements;
  std::vector<std::int64_t> local_sizes;
  std::int64_t local_bytes = 0;
};

/// One row for each parameter of a module, in its order: plain, distributed or FSDP-sharded (the
/// form that persists). Not collective.
std::vector<ShardingRow> sharding_table(const nn::ModuleBase& module);

}  // namespace tessera::observe
