#include "rank_environment.h"

#include <sched.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <map>

namespace tessera::run {
namespace {

int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

std::map<std::string, std::string> own_environment() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const auto equals = text.find('=');
    if (equals != std::string::npos) {
      variables[text.substr(0, equals)] = text.substr(equals + 1);
    }
  }
  return variables;
}

}  // namespace

std::string job_token(const Options& options) {
  if (const char* given = std::getenv("TESSERA_JOB_TOKEN")) {
    return given;
  }
  if (options.nnodes > 1) {
    return {};
  }
  std::array<std::uint8_t, 16> bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
    fail_errno("cannot get random bytes");
  }
  std::string token;
  for (const auto byte : bytes) {
    token += "0123456789abcdef"[byte >> 4];
    token += "0123456789abcdef"[byte & 15];
  }
  return token;
}

std::vector<std::string> rank_environment(const Options& options, const Rendezvous& rendezvous,
                                          const std::string& token, int local_rank) {
  auto variables = own_environment();
  const int rank = options.first_rank() + local_rank;
  variables["RANK"] = std::to_string(rank);
  variables["LOCAL_RANK"] = std::to_string(local_rank);
  variables["WORLD_SIZE"] = std::to_string(options.world_size());
  variables["LOCAL_WORLD_SIZE"] = std::to_string(options.nproc);
  variables["MASTER_ADDR"] = rendezvous.host;
  variables["MASTER_PORT"] = std::to_string(rendezvous.port);
  if (auto& threads = variables["OMP_NUM_THREADS"]; threads.empty()) {
    threads = std::to_string(std::max(1, usable_cores() / options.nproc));
  }
  if (!token.empty()) {
    variables["TESSERA_JOB_TOKEN"] = token;
  }
  variables.erase("TESSERA_STORE_FD");
  if (rank == 0) {
    variables["TESSERA_STORE_FD"] = std::to_string(rendezvous.listener.get());
  }
  std::vector<std::string> environment;
  for (const auto& [name, value] : variables) {
    environment.push_back(name + "=" + value);
  }
  return environment;
}

}  // namespace tessera::run
