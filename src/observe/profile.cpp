// Runs libtorch's profiler, and adds profiler ranges for the modules of a model.

#include "tessera/observe/profile.h"
#include "tessera/nn/detail/records.h"

#include <ATen/record_function.h>

#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/internals/detail/devices.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/threads.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/module.h"

namespace tessera::observe {

/// Makes each forward and recomputation of a module of `model` a profiler range. Hooks run on the
/// threads of forward and of autograd, but never at the same time.
class ModuleRanges : tessera::detail::NoCopy {
 public:
  explicit ModuleRanges(nn::ModuleBase& model) {
    nn::visit_modules(model, [this](const std::string& fqn, nn::ModuleBase& module) {
      hooked_.push_back(hooks_of(module));
      *hooked_.back() = {this, fqn.empty() ? module.name() : fqn};
    });
  }
  ~ModuleRanges() {
    for (const std::shared_ptr<Hooks>& hooks : hooked_) {
      hooks->ranges = nullptr;
    }
  }

 private:
  /// The hooks that a profile registers on a module. Hooks cannot be removed, so the hooks do
  /// nothing if `ranges` is nullptr.
  struct Hooks {
    ModuleRanges* ranges = nullptr;
    std::string module{};
  };

  static std::shared_ptr<Hooks> hooks_of(nn::ModuleBase& module) {
    auto hooks = module.attached<Hooks>();
    if (hooks == nullptr) {
      hooks = std::make_shared<Hooks>();
      module.attach(hooks);
      module.add_forward_pre_hook([hooks](auto&, auto) {
        if (hooks->ranges != nullptr) {
          hooks->ranges->begin(hooks->module);
        }
      });
      module.add_always_hook([hooks] {
        if (hooks->ranges != nullptr) {
          hooks->ranges->end(hooks->module);
        }
      });
    }
    return hooks;
  }

  void begin(const std::string& module) {
    auto range = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    if (range->isActive()) {
      range->before(module + (nn::is_recomputing() ? ": recomputation" : ": forward"));
    }
    open_.emplace_back(module, std::move(range));
  }
  /// Ends a module's profiler range. Also called if the forward, or a hook that runs before
  /// begin(), has thrown an exception.
  void end(const std::string& module) {
    if (!open_.empty() && open_.back().first == module) {
      open_.pop_back();
    }
  }

  std::vector<std::shared_ptr<Hooks>> hooked_;
  /// The profiler ranges that have not ended, with their modules, the innermost range last.
  std::vector<std::pair<std::string, std::unique_ptr<at::RecordFunction>>> open_;
};

Profile::Profile(c10::Device device, nn::ModuleBase* model) {
  TESSERA_CHECK(!detail::profiler_runs(),
                "a profile of this process is already running; end that profile first");
  detail::begin_profile(/*gpu=*/device.is_cuda());
  if (model != nullptr) {
    ranges_ = std::make_unique<ModuleRanges>(*model);
  }
}

Profile::~Profile() {
  ranges_.reset();
  if (runs_) {
    detail::drop_profile();
  }
}

void Profile::write(const std::filesystem::path& file) {
  TESSERA_CHECK(runs_, "the profile is already written; make a new Profile for another file");
  runs_ = false;
  ranges_.reset();
  std::filesystem::path unfinished = file;
  unfinished += ".unfinished";
  std::error_code error;
  std::filesystem::remove(unfinished, error);
  detail::save_profile(unfinished.string());
  std::filesystem::rename(unfinished, file, error);
  if (error) {
    std::filesystem::remove(unfinished += ".tmp", error);  // Kineto has left an incomplete file
    fail("can't write the profile ", file.string(), ": check that the folder exists and has space");
  }
}

}  // namespace tessera::observe
