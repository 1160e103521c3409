// The environment variables that the fake reads, once, when it is first called.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fake_cuda {

/// When calls fail on demand: TESSERA_FAKE_CUDA_FAULT, a comma-separated list of KIND:NUMBER or
/// KIND:NUMBER@RANK. Numbers of calls start at 1.
struct Faults {
  std::optional<std::int64_t> malloc;        ///< this and all later cudaMallocs find no memory
  std::optional<std::int64_t> malloc_above;  ///< every cudaMalloc of more bytes finds no memory
  std::optional<std::int64_t> nccl;          ///< this collective returns an error
  std::optional<std::int64_t> lost;          ///< this collective and all later ones never start
  std::optional<std::int64_t> async;         ///< from this collective on the communicator is broken
  std::optional<std::int64_t> init;          ///< the making of this communicator never returns
  std::optional<std::int64_t> slow_end;      ///< the end of this communicator takes a second
};

struct Settings {
  int rank;             ///< RANK, 0 without it
  std::string report;   ///< TESSERA_FAKE_CUDA_REPORT: where reports go; none if empty
  int devices;          ///< TESSERA_FAKE_CUDA_DEVICES
  std::int64_t memory;  ///< TESSERA_FAKE_CUDA_MEMORY: bytes a device
  Faults faults;
};

const Settings& settings();

/// Throws std::invalid_argument that names the entry. Entries of other ranks are left out.
Faults parse_faults(const std::string& text, int rank);

}  // namespace fake_cuda
