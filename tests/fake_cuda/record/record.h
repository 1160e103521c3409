#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace fake_cuda {

/// Return addresses of a thread, innermost frame first, without frames of the fake library.
using CallStack = std::vector<void*>;

CallStack take_stack();

/// Returns a line for each frame: the demangled function name, else library+offset.
std::vector<std::string> describe(const CallStack& stack);

std::string demangle(const char* name);

// Counts of all CUDA, cuBLAS and NCCL calls of the process, for its report.

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
  std::string id;
  int ranks = 0;
  int rank = 0;
  std::string made_by;  ///< "init" or "split"
  bool finalized = false;
  std::string ended_by;     ///< "destroy" or "abort"; empty while the communicator exists
  std::int64_t ended = -1;  ///< position among all ended communicators; -1: not ended
};

/// Collectives with equal keys are counted in one entry, even if their sizes differ.
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
  std::int64_t bytes = 0;
  std::int64_t unaligned = 0;  ///< `unaligned`: calls with a buffer address not divisible by 16
  std::int64_t unaligned_part = 0;
};

/// The contents of this process's report. `mutex` guards all other members.
struct Record {
  std::mutex mutex;
  std::map<std::string, std::int64_t> calls;
  std::map<const char*, std::int64_t> launches;  ///< key: address of the kernel's mangled name
  std::map<std::string, std::int64_t> gemms;
  std::map<std::pair<std::string, CallStack>, std::int64_t> host_syncs;
  std::map<std::pair<std::string, CallStack>, std::int64_t> violations;
  std::map<int, CallStack> contexts;  ///< key: device; value: who created the CUDA context
  MemoryUse device_memory;
  MemoryUse pinned_memory;
  std::map<std::int64_t, StreamUse> streams;
  std::vector<CommunicatorUse> communicators;
  std::map<CollectiveKey, CollectiveUse> collectives;
};

/// Returns the record, which is never destroyed: libraries call the fake until the process exits.
Record& record();

void count_call(const char* name);

/// Counts a call in which the calling thread waits for the device.
void count_host_sync(const char* call);

/// Counts a wrong or unsupported call, which `what` describes.
void count_violation(const std::string& what);

/// Writes TESSERA_FAKE_CUDA_REPORT.RANK.json if the process has used the fake library.
void write_reports();

/// The memory size of each fake device, in bytes: as much as an H200 has.
constexpr std::int64_t kDeviceBytes = std::int64_t{140} << 30;

// The environment variables of the fake library. They are read once, at the first call.

/// Faults in TESSERA_FAKE_CUDA_FAULT=KIND:INDEX[@RANK],... (see README.md). Key: the fault's kind.
/// Value: the index (from 1) of the call that fails.
using Faults = std::map<std::string, std::int64_t>;

struct Settings {
  int rank;
  std::string report;  ///< TESSERA_FAKE_CUDA_REPORT: path prefix of reports; "": none
  int devices;         ///< TESSERA_FAKE_CUDA_DEVICES: number of devices
  Faults faults;

  /// Returns the index (from 1) of the call that fails with the fault `kind`; nullopt: none fails.
  std::optional<std::int64_t> fault(const std::string& kind) const;
};

const Settings& settings();

}  // namespace fake_cuda
