#include "devices.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

namespace tessera::run {

namespace {

bool names_gpu(std::string_view entry) {
  entry.remove_prefix(std::min(entry.find_first_not_of(' '), entry.size()));
  return entry.starts_with("GPU-") || entry.starts_with("MIG-") ||
         (!entry.empty() && entry.front() >= '0' && entry.front() <= '9');
}

// As CUDA reads the list: up to the first entry that names no GPU, such as -1.
int count_listed(std::string_view list) {
  int gpus = 0;
  while (names_gpu(list.substr(0, list.find(',')))) {
    ++gpus;
    list.remove_prefix(std::min(list.find(','), list.size() - 1) + 1);
  }
  return gpus;
}

}  // namespace

int count_gpus() {
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible != nullptr) {
    return count_listed(visible);
  }
  int gpus = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", error)) {
    const std::string name = entry.path().filename().string();
    gpus += name.starts_with("nvidia") && name.size() > 6 &&
                    name.find_first_not_of("0123456789", 6) == std::string::npos
                ? 1
                : 0;
  }
  return gpus;
}

int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? std::max(CPU_COUNT(&set), 1) : 1;
}

}  // namespace tessera::run
