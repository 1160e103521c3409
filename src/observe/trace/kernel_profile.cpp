#include "tessera/observe/kernel_profile.h"

#include <system_error>

#include "tessera/core/error.h"
#include "tessera/internals/detail/devices.h"

namespace tessera::observe {

KernelProfile::KernelProfile(c10::Device device) {
  TESSERA_CHECK(!detail::profiler_runs(),
                "a profile of this process is under way; write it, or end it, before another");
  detail::begin_profile(/*gpu=*/device.is_cuda());
}

KernelProfile::~KernelProfile() {
  if (runs_) {
    detail::drop_profile();
  }
}

void KernelProfile::write(const std::filesystem::path& file) {
  TESSERA_CHECK(runs_, "a profile can be written once");
  runs_ = false;
  std::filesystem::path unfinished = file;
  unfinished += ".unfinished";
  std::error_code error;
  std::filesystem::remove(unfinished, error);
  detail::save_profile(unfinished.string());
  std::filesystem::rename(unfinished, file, error);
  TESSERA_CHECK(!error, "can't write the profile ", file.string(), ": ", error.message());
}

}  // namespace tessera::observe
