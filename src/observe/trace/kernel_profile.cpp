#include "tessera/observe/kernel_profile.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <set>
#include <system_error>

#include "tessera/core/error.h"

namespace tessera::observe {

namespace profiler = torch::autograd::profiler;

KernelProfile::KernelProfile(c10::Device device) {
  TESSERA_CHECK(!profiler::profilerEnabled(),
                "a profile of this process is under way; write it, or end it, before another");
  std::set<profiler::ActivityType> activities{profiler::ActivityType::CPU};
  if (device.is_cuda()) {
    activities.insert(profiler::ActivityType::CUDA);
  }
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
}

KernelProfile::~KernelProfile() {
  if (runs_) {
    profiler::disableProfiler();
  }
}

void KernelProfile::write(const std::filesystem::path& file) {
  TESSERA_CHECK(runs_, "a profile can be written once");
  runs_ = false;
  const auto result = profiler::disableProfiler();
  std::filesystem::path unfinished = file;
  unfinished += ".unfinished";
  std::error_code error;
  std::filesystem::remove(unfinished, error);
  result->save(unfinished.string());  // says nothing of what fails
  std::filesystem::rename(unfinished, file, error);
  TESSERA_CHECK(!error, "can't write the profile ", file.string(), ": ", error.message());
}

}  // namespace tessera::observe
