#include "all_ranks.h"

#include <c10/core/Device.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/rank_threads.h"
#include "tessera/comm/world.h"
#include "tessera/core/detail/read_error.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

/// The result of a failed read for the files.
struct Proof {
  bool damaged = false;
  std::string missing;  ///< the file that was not there
};

void read(const std::function<void()>& work, Proof& proof) {
  try {
    work();
  } catch (const detail::ReadError& error) {
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
  if (comm::any_rank(*group, device, gone || (first && own.damaged))) {
    throw DamagedStep(failure->message);
  }
  throw Error(failure->message);
}

}  // namespace tessera::checkpoint
