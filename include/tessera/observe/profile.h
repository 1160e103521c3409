#pragma once

#include <c10/core/Device.h>

#include <filesystem>
#include <memory>

#include "tessera/export.h"
#include "tessera/nn/module.h"

TESSERA_API_BEGIN
namespace tessera::observe {

class ModuleRanges;

/// The record of libtorch's profiler (Kineto) while the object exists: operators, each
/// RECORD_USER_SCOPE, collectives, and on a GPU kernels and copies with their streams. With a
/// `model` also the forward, recomputation and backward of each of its modules, by FQN; the model
/// itself has the name of its class. The profiler slows every operator down, so a step or two are
/// enough. Not collective.
///
/// A module's backward is that of the autograd nodes that its forward made. Collectives of hooks
/// that were in the model before (FSDP's, and those of tensor-parallel styles) appear before or
/// after the module, within the module around it.
///
/// Thread safety: made and used by one thread, for whole steps; the backward of this thread is
/// recorded, too.
class Profile {
 public:
  /// Begins. Adds permanent hooks to the modules of `model`, which do nothing without a profile.
  /// Throws Error if a profile of this process is running.
  explicit Profile(c10::Device device, nn::ModuleBase* model = nullptr);
  /// Ends the profile, unless write() has.
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  /// Ends the profile and writes it as a Chrome trace, which torch.profiler's tools read too. At
  /// most once. Throws Error if the file can't be written; replaces an existing file.
  void write(const std::filesystem::path& file);

 private:
  bool runs_ = true;
  std::unique_ptr<ModuleRanges> ranges_;
};

}  // namespace tessera::observe
TESSERA_API_END
