// Runs libtorch's profiler, and adds a profiler range for each module. Autograd numbers its nodes
// in creation order, so a module's forward creates a range of node numbers. libtorch's
// RecordFunction reports the number of the node that backward is running, which identifies the
// module.

#include "tessera/observe/profile.h"
#include "tessera/nn/detail/records.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/devices.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/threads.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/module.h"

namespace tessera::observe {
// A named namespace instead of an anonymous one, because ModuleRanges has members of these types.
namespace module_ranges {

/// The ranges of one profile. Methods are called on the threads of forward and of autograd, but
/// never at the same time.
class Ranges : public std::enable_shared_from_this<Ranges> {
 public:
  Ranges() : thread_(at::RecordFunction::currentThreadId()) {}

  void end() {
    end_backward();
    open_.clear();
  }

  void before_forward(const std::string& module) {
    const bool again = nn::is_recomputing();
    calls_.push_back({module, std::nullopt});
    if (!again) {
      made_.push_back({tessera::detail::next_sequence_number(), kOpen, module, innermost_});
      innermost_ = calls_.back().made = made_.size() - 1;
    }
    enter(module + (again ? ": recomputation" : ": forward"));
  }

  /// Ends a module's range. Called also if the forward, or a hook that runs before this function,
  /// has thrown.
  void after_forward(const std::string& module) {
    if (calls_.empty() || calls_.back().module != module) {
      return;
    }
    if (const std::optional<std::size_t> made = calls_.back().made) {
      made_[*made].end = tessera::detail::next_sequence_number();
      innermost_ = made_[*made].parent;
    }
    calls_.pop_back();
    leave();
  }

  void backward_runs(const at::RecordFunction& function) {
    if (function.seqNr() >= 0 && function.forwardThreadId() == thread_) {
      show_backward(path_of(static_cast<std::uint64_t>(function.seqNr())));
    }
  }

 private:
  static constexpr auto kOpen = std::numeric_limits<std::uint64_t>::max();

  /// The autograd nodes that a forward created: numbers [begin, end).
  struct Made {
    std::uint64_t begin, end;
    std::string module;
    std::optional<std::size_t> parent;  ///< index in made_ of the enclosing forward
  };
  struct Call {
    std::string module;
    std::optional<std::size_t> made;  ///< index of the forward in made_; nullopt: a recomputation
  };

  void enter(const std::string& name) {
    open_.push_back(std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE));
    if (open_.back()->isActive()) {
      open_.back()->before(name);
    }
  }
  void leave() { open_.pop_back(); }

  /// The forwards in which a node was created, outermost first.
  std::vector<std::size_t> path_of(std::uint64_t node) const {
    // made_ is sorted by the start of the forwards: inner forwards come after the forwards that
    // enclose them.
    const auto after = std::ranges::upper_bound(made_, node, {}, &Made::begin);
    std::optional<std::size_t> made;
    if (after != made_.begin()) {
      made = static_cast<std::size_t>(after - made_.begin()) - 1;
    }
    std::vector<std::size_t> path;
    for (; made; made = made_[*made].parent) {
      if (node < made_[*made].end) {
        path.push_back(*made);
      }
    }
    std::ranges::reverse(path);
    return path;
  }

  void show_backward(const std::vector<std::size_t>& path) {
    const auto [mine, given] = std::ranges::mismatch(backward_, path);
    for (auto count = backward_.end() - mine; count > 0; --count) {
      leave();
    }
    for (auto next = given; next != path.end(); ++next) {
      enter(made_[*next].module + ": backward");
    }
    backward_ = path;
    // Open ranges are closed when backward ends, because it is not known which node is the last.
    const int task = tessera::detail::backward_id();
    if (std::exchange(task_, task) != task) {
      tessera::detail::queue_end_of_backward([ranges = weak_from_this()] {
        if (const std::shared_ptr<Ranges> alive = ranges.lock()) {
          alive->end_backward();
        }
      });
    }
  }
  void end_backward() {
    for (; !backward_.empty(); backward_.pop_back()) {
      leave();
    }
  }

  std::vector<std::unique_ptr<at::RecordFunction>> open_;  ///< open profiler ranges, innermost last
  std::uint64_t thread_;                                   ///< the thread that runs forward
  std::vector<Made> made_;  ///< all forwards of the profile, in the order of their start
  std::optional<std::size_t> innermost_;
  std::vector<Call> calls_;            ///< forwards that have not ended
  std::vector<std::size_t> backward_;  ///< the forwards whose backward is running
  int task_ = -1;                      ///< id of the backward at whose end the ranges are closed
};

/// The hooks that a profile attaches to a module. Hooks cannot be removed; without `ranges` these
/// hooks do nothing.
struct RangeHooks {
  std::shared_ptr<Ranges> ranges;
  std::string module;
};

inline RangeHooks& hooks_of(nn::ModuleBase& module) {
  auto hooks = module.attached<RangeHooks>();
  if (hooks == nullptr) {
    hooks = std::make_shared<RangeHooks>();
    module.attach(hooks);
    module.add_forward_pre_hook([hooks](auto&, auto) {
      if (hooks->ranges != nullptr) {
        hooks->ranges->before_forward(hooks->module);
      }
    });
    module.add_always_hook([hooks] {
      if (hooks->ranges != nullptr) {
        hooks->ranges->after_forward(hooks->module);
      }
    });
  }
  return *hooks;
}

using ActiveRanges = detail::CarriedScope<detail::Carried::kModuleWatch, Ranges*>;

inline std::unique_ptr<at::ObserverContext> begin_function(const at::RecordFunction& function) {
  if (Ranges* const* ranges = ActiveRanges::active()) {
    (*ranges)->backward_runs(function);
  }
  return nullptr;
}

}  // namespace module_ranges

/// While this object exists, the modules of `model` have profiler ranges, on this thread and in its
/// backward calls.
class ModuleRanges {
 public:
  explicit ModuleRanges(nn::ModuleBase& model)
      : ranges_(std::make_shared<module_ranges::Ranges>()), carried_(ranges_.get()) {
    nn::visit_modules(model, [&](const std::string& fqn, nn::ModuleBase& module) {
      hooked_.push_back(&module_ranges::hooks_of(module));
      *hooked_.back() = {ranges_, fqn.empty() ? module.name() : fqn};
    });
    callback_ =
        at::addThreadLocalCallback(at::RecordFunctionCallback(&module_ranges::begin_function)
                                       .scopes({at::RecordScope::BACKWARD_FUNCTION}));
  }
  ~ModuleRanges() {
    at::removeCallback(callback_);
    for (module_ranges::RangeHooks* hooks : hooked_) {
      hooks->ranges = nullptr;
    }
    ranges_->end();
  }
  ModuleRanges(const ModuleRanges&) = delete;
  ModuleRanges& operator=(const ModuleRanges&) = delete;

 private:
  std::shared_ptr<module_ranges::Ranges> ranges_;
  module_ranges::ActiveRanges carried_;
  std::vector<module_ranges::RangeHooks*> hooked_;
  std::uint64_t callback_ = 0;
};

Profile::Profile(c10::Device device, nn::ModuleBase* model) {
  TESSERA_CHECK(!detail::profiler_runs(),
                "a profile of this process is running; write it, or end it, before another");
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
  TESSERA_CHECK(runs_, "a profile can be written once");
  runs_ = false;
  ranges_.reset();
  std::filesystem::path unfinished = file;
  unfinished += ".unfinished";
  std::error_code error;
  std::filesystem::remove(unfinished, error);
  detail::save_profile(unfinished.string());
  std::filesystem::rename(unfinished, file, error);
  TESSERA_CHECK(!error, "can't write the profile ", file.string(), ": ", error.message());
}

}  // namespace tessera::observe
