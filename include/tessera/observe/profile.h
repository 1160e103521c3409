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

/// Records a profile with libtorch's profiler (Kineto) while the object exists: operators, each
/// RECORD_USER_SCOPE, collectives, and on a GPU kernels and copies with their streams. With a
/// `model`, the profile also contains the forward and recomputation of each module, by FQN; the
/// root is named by its class. The profiler slows down every operator, so profile only one or two
/// steps. Not collective.
///
/// Thread safety: create and use a Profile on one thread, for whole steps. Backward calls of this
/// thread are also recorded.
class Profile : tessera::detail::NoCopy {
 public:
  /// Starts the profile. Adds permanent hooks to the modules of `model`. The hooks do nothing while
  /// no profile is running. Throws Error if another profile is running in this process.
  explicit Profile(c10::Device device, nn::ModuleBase* model = nullptr);
  /// Ends the profile, unless write() has already ended the profile.
  ~Profile();

  /// Ends the profile and writes a Chrome trace, which the tools of torch.profiler can also read.
  /// Call write() at most once. Replaces an existing file. Throws Error if the file can't be
  /// written.
  void write(const std::filesystem::path& file);

 private:
  bool runs_ = true;
  std::unique_ptr<ModuleRanges> ranges_;
};

}  // namespace tessera::observe
TESSERA_API_END
