#pragma once

#include <c10/core/Device.h>

#include <filesystem>
#include <memory>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// What libtorch's profiler (Kineto) sees of this process while the object exists: operators and,
/// on a GPU, kernels and copies with their streams. It slows every operator down, so that a step or
/// two are enough. Not collective. StepTrace shows modules and collectives of all ranks instead.
///
/// Thread safety: made and used by one thread; what runs in the backward of this thread is seen.
class KernelProfile {
 public:
  /// Begins. Throws Error where a profile of this process is under way.
  explicit KernelProfile(c10::Device device);
  /// Ends it, if write() has not.
  ~KernelProfile();
  KernelProfile(const KernelProfile&) = delete;
  KernelProfile& operator=(const KernelProfile&) = delete;

  /// Ends it and writes it as a Chrome trace, which torch.profiler's tools read too. At most once.
  /// Throws Error where the file can't be written; another file of that name is replaced.
  void write(const std::filesystem::path& file);

 private:
  bool runs_ = true;
};

}  // namespace tessera::observe
TESSERA_API_END
