#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

// The stack of a call, which is cheap to record and slow to print.

namespace fake_cuda {

/// Return addresses, innermost first, without those of the fake itself.
using CallStack = std::vector<void*>;

CallStack take_stack();

/// A line a frame: the demangled function or, where its library keeps no name, library+offset.
std::vector<std::string> describe(const CallStack& stack);

/// The demangled name, or `name` itself if it is not mangled.
std::string demangle(const char* name);

// All calls that the process has made: the material of its report.

/// Memory of one kind: on devices, or pinned on the host.
struct MemoryUse {
  std::int64_t active = 0;
  std::int64_t allocations = 0;
};

struct StreamUse {
  int device = 0;
  std::int64_t launches = 0;
  std::int64_t copies = 0;
};

struct CommunicatorUse {
  std::string id;  ///< the same on its ranks
  int ranks = 0;
  int rank = 0;
  std::string made_by;  ///< init or split
  bool finalized = false;
  std::string ended_by;     ///< destroy or abort; empty while it lives
  std::int64_t ended = -1;  ///< its place among the ends of this process's communicators
};

/// Counts of the collectives that differ only in size.
struct CollectiveKey {
  std::string communicator;
  std::string name;
  std::string type;
  std::int64_t stream = 0;
  int priority = 0;

  auto operator<=>(const CollectiveKey&) const = default;
};

struct CollectiveUse {
  std::int64_t calls = 0;
  std::int64_t bytes = 0;           ///< of this rank's input
  std::int64_t unaligned = 0;       ///< calls whose buffers do not begin at a multiple of 16 bytes
  std::int64_t unaligned_part = 0;  ///< bytes of the largest part that is no multiple of 16 bytes
};

/// The record of the process. `mutex` guards every member.
struct Record {
  std::mutex mutex;
  std::map<std::string, std::int64_t> calls;
  std::map<const char*, std::int64_t> launches;  ///< by the kernel's mangled name, one address each
  std::map<std::string, std::int64_t> gemms;
  std::map<std::pair<std::string, CallStack>, std::int64_t> host_syncs;
  std::map<std::pair<std::string, CallStack>, std::int64_t> violations;
  std::map<int, CallStack> contexts;  ///< devices, with the call that made the process's context
  MemoryUse device_memory;
  MemoryUse pinned_memory;
  std::map<std::int64_t, StreamUse> streams;
  std::vector<CommunicatorUse> communicators;
  std::map<CollectiveKey, CollectiveUse> collectives;
};

/// Never destroyed: other libraries call in until the very end of the process.
Record& record();

void count_call(const char* name);

/// Counts a wait of the calling thread for a device.
void count_host_sync(const char* call);

/// Counts a call that no correct program makes, or that the fake does not offer.
void count_violation(const std::string& what);

/// Writes TESSERA_FAKE_CUDA_REPORT.RANK.json, if the process has used the fake.
void write_reports();

/// The memory of each device, that of an H200.
constexpr std::int64_t kDeviceBytes = std::int64_t{140} << 30;

// The environment variables that the fake reads, once, when it is first called.

/// Faults of TESSERA_FAKE_CUDA_FAULT, a comma-separated list of KIND:NUMBER or KIND:NUMBER@RANK, by
/// kind (README.md). The first call has number 1.
using Faults = std::map<std::string, std::int64_t>;

struct Settings {
  int rank;            ///< RANK, 0 without it
  std::string report;  ///< TESSERA_FAKE_CUDA_REPORT: where reports go; none if empty
  int devices;         ///< TESSERA_FAKE_CUDA_DEVICES
  Faults faults;

  /// The number of a fault; nullopt if there is none.
  std::optional<std::int64_t> fault(const std::string& kind) const;
};

const Settings& settings();

}  // namespace fake_cuda
