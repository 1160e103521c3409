#pragma once

#include <c10/core/Device.h>

#include <filesystem>
#include <memory>

#include "tessera/core/detail/no_copy.h"
#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::observe {

class ModuleRanges;

/// Records a profile with libtorch's profiler (Kineto) while the object exists: operators, scopes,
/// collectives and, on a GPU, kernels and copies. With a `model`, also records the forward of each
/// module, by FQN. Profile only one or two steps, because operators become slower. Not collective.
/// Use a Profile on one thread, for whole steps.
class Profile : tessera::detail::NoCopy {
 public:
  /// Starts the profile. Adds hooks to the modules of `model`; the hooks remain, but do nothing
  /// without a profile. Throws Error if this process has another running profile.
  explicit Profile(c10::Device device, nn::ModuleBase* model = nullptr);
  /// Ends the profile, unless write() has already ended the profile.
  ~Profile();

  /// Ends the profile and writes a Chrome trace. Replaces an existing file. Call write() at most
  /// once. Throws Error if the file can't be written.
  void write(const std::filesystem::path& file);

 private:
  bool runs_ = true;
  std::unique_ptr<ModuleRanges> ranges_;
};

}  // namespace tessera::observe
TESSERA_API_END
