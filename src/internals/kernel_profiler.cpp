#include "tessera/internals/detail/kernel_profiler.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <set>

namespace tessera::detail {

namespace profiler = torch::autograd::profiler;

bool profiler_runs() {
  return profiler::profilerEnabled();
}

void begin_profile(bool gpu) {
  std::set<profiler::ActivityType> activities{profiler::ActivityType::CPU};
  if (gpu) {
    activities.insert(profiler::ActivityType::CUDA);
  }
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
}

void drop_profile() {
  profiler::disableProfiler();
}

void save_profile(const std::string& file) {
  profiler::disableProfiler()->save(file);
}

}  // namespace tessera::detail
