// Forward and backward are matched by the numbers of autograd's nodes: a module's forward makes the
// nodes in a range of numbers, and libtorch's RecordFunction tells which node backward runs.

#include "tessera/observe/module_watch.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::observe {

const char* to_string(Activity activity) {
  switch (activity) {
    case Activity::kForward:
      return "forward";
    case Activity::kRecomputation:
      return "recomputation";
    case Activity::kBackward:
      return "backward";
    case Activity::kScope:
      return "scope";
  }
  return "unknown";
}

class ModuleWatch::State : public std::enable_shared_from_this<State> {
 public:
  std::size_t add_module(std::string name) {
    names_.push_back(std::move(name));
    return names_.size() - 1;
  }
  void add(ActivityListener& listener) { listeners_.push_back(&listener); }

  void begin() {
    active_ = true;
    thread_ = at::RecordFunction::currentThreadId();
    made_.clear();
  }
  void end() {
    end_backward();
    active_ = false;
    calls_.clear();
  }

  void before_forward(std::size_t module) {
    if (!active_) {
      return;
    }
    const bool again = nn::is_recomputing();
    calls_.push_back({module, std::nullopt});
    if (!again) {
      made_.push_back({tessera::detail::next_sequence_number(), kOpen, module, innermost_});
      innermost_ = calls_.back().made = made_.size() - 1;
    }
    enter(again ? Activity::kRecomputation : Activity::kForward, names_[module]);
  }

  /// Also where the forward, or a hook before this watch's, has thrown.
  void after_forward(std::size_t module) {
    if (!active_ || calls_.empty() || calls_.back().module != module) {
      return;
    }
    if (const std::optional<std::size_t> made = calls_.back().made) {
      made_[*made].end = tessera::detail::next_sequence_number();
      innermost_ = made_[*made].parent;
    }
    calls_.pop_back();
    leave();
  }

  void begin(const at::RecordFunction& function) {
    if (function.scope() == at::RecordScope::USER_SCOPE) {
      enter(Activity::kScope, function.name());
    } else if (function.seqNr() >= 0 && function.forwardThreadId() == thread_) {
      show_backward(path_of(static_cast<std::uint64_t>(function.seqNr())));
    }
  }
  void end(const at::RecordFunction& function) {
    if (function.scope() == at::RecordScope::USER_SCOPE) {
      leave();
    }
  }

 private:
  static constexpr auto kOpen = std::numeric_limits<std::uint64_t>::max();

  /// The nodes that a forward made: numbers [begin, end).
  struct Made {
    std::uint64_t begin, end;
    std::size_t module;
    std::optional<std::size_t> parent;  ///< the forward around it
  };
  struct Call {
    std::size_t module;
    std::optional<std::size_t> made;  ///< nullopt: a recomputation
  };

  void enter(Activity activity, const std::string& name) {
    for (ActivityListener* listener : listeners_) {
      listener->entered(activity, name);
    }
  }
  void leave() {
    for (ActivityListener* listener : listeners_) {
      listener->left();
    }
  }

  /// The forwards in which a node was made, from the outermost on.
  std::vector<std::size_t> path_of(std::uint64_t node) const {
    // Forwards began in this order, those within others after them.
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
      enter(Activity::kBackward, names_[made_[*next].module]);
    }
    backward_ = path;
    // No node is the last one.
    const int task = tessera::detail::backward_id();
    if (std::exchange(task_, task) != task) {
      tessera::detail::queue_end_of_backward([state = weak_from_this()] {
        if (const std::shared_ptr<State> alive = state.lock()) {
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

  std::vector<std::string> names_;
  std::vector<ActivityListener*> listeners_;
  bool active_ = false;
  std::uint64_t thread_ = 0;  ///< that runs forward
  std::vector<Made> made_;    ///< of the step, in order
  std::optional<std::size_t> innermost_;
  std::vector<Call> calls_;            ///< under way
  std::vector<std::size_t> backward_;  ///< the forwards whose backward is under way
  int task_ = -1;                      ///< the task of autograd's engine whose end is awaited
};

namespace {

using Active = detail::CarriedScope<detail::Carried::kModuleWatch, ModuleWatch::State*>;

std::unique_ptr<at::ObserverContext> begin_function(const at::RecordFunction& function) {
  if (ModuleWatch::State* const* state = Active::active()) {
    (*state)->begin(function);
  }
  return nullptr;
}

void end_function(const at::RecordFunction& function, at::ObserverContext* /*context*/) {
  if (ModuleWatch::State* const* state = Active::active()) {
    (*state)->end(function);
  }
}

}  // namespace

ModuleWatch::ModuleWatch(nn::ModuleBase& model) : state_(std::make_shared<State>()) {
  nn::visit_modules(model, [&](const std::string& fqn, nn::ModuleBase& module) {
    const std::size_t number = state_->add_module(fqn.empty() ? module.name() : fqn);
    module.add_forward_pre_hook(
        [state = state_, number](auto&, auto) { state->before_forward(number); });
    module.add_always_hook([state = state_, number] { state->after_forward(number); });
  });
}

void ModuleWatch::add(ActivityListener& listener) {
  state_->add(listener);
}

ModuleWatch::Scope::Scope(const ModuleWatch& watch) : state_(watch.state_), carried_(state_.get()) {
  state_->begin();
  callback_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&begin_function, &end_function)
          .scopes({at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE}));
}

ModuleWatch::Scope::~Scope() {
  at::removeCallback(callback_);
  state_->end();
}

}  // namespace tessera::observe
