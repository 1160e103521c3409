#include "devices.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

namespace tessera::run {

int count_gpus() {
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES"); visible != nullptr) {
    const std::string_view list(visible);
    return list.empty() || list.starts_with('-')
               ? 0
               : 1 + static_cast<int>(std::ranges::count(list, ','));
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
