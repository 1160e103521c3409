// Implements verify(). Every rank runs the one-rank reference model with the rank's own samples.
// The only communicated results of the reference model are the gradients, which are averaged.
#include "tessera/observe/verify.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "tessera/comm/agreement.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/agreement.h"
#include "tessera/core/detail/no_copy.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/records.h"
#include "tessera/nn/detail/slots.h"
#include "tessera/nn/initialization.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"
#include "verify_parts.h"

namespace tessera::observe {
namespace {

/// Returns a copy of a tensor, because the program can later write to the tensor. The copy is
/// invisible to autograd and to selective activation checkpointing.
at::Tensor copy_of(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  const OperatorModePause no_mode;
  return tensor.defined() ? tensor.detach().clone() : tensor;
}

class Recorder {
 public:
  void begin_call(const std::string& fqn, nn::TensorList inputs) {
    const auto batch = std::ranges::find_if(
        inputs, [](const at::Tensor* tensor) { return tensor->defined() && tensor->dim() > 0; });
    if (fqn.empty() && batch != inputs.end()) {
      run.rows = (*batch)->size(0);
    }
    const Call around = running_.empty() ? Call{} : running_.back();
    running_.push_back({fqn, around.fqn, ++calls_, around.number, ++run.calls[fqn]});
    note(running_.back(), inputs, /*is_input=*/true);
  }
  void end_call(nn::TensorList outputs) {
    const Call call = running_.back();
    running_.pop_back();
    note(call, outputs, /*is_input=*/false);
  }

  /// Returns the name of the innermost running module in quotes: "'layers.0.norm'"; "" if no module
  /// is running.
  std::string running() const {
    return running_.empty() || running_.back().fqn.empty() ? "" : "'" + running_.back().fqn + "'";
  }
  SeenRun run;

 private:
  struct Call {
    std::string fqn{}, caller{};
    int number = 0, parent = 0;  ///< indices of the module call and of the enclosing call
    int of_module = 0;           ///< index of the call among the calls of the same module
  };

  void note(const Call& call, nn::TensorList tensors, bool is_input) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::string number = tensors.size() == 1 ? "" : fmt::format(" {}", i);
      const std::string module = call.fqn.empty() ? "the model" : "'" + call.fqn + "'";
      const std::string again = call.of_module == 1 ? "" : fmt::format(", call {}", call.of_module);
      run.tensors.push_back(
          {fmt::format("{}{} of {}{}", is_input ? "input" : "output", number, module, again),
           call.fqn, copy_of(*tensors[i]), call.caller, call.number, call.parent, is_input});
    }
  }

  std::vector<Call> running_;
  int calls_ = 0;
};

/// The hooks that record the calls of a module. Hooks cannot be removed, so the hooks do nothing if
/// `recorder` is nullptr.
struct Watch {
  Recorder* recorder = nullptr;
  std::string fqn{};
  bool records() const { return recorder != nullptr && !nn::is_recomputing(); }
};

Watch& watch_of(nn::ModuleBase& module) {
  auto watch = module.attached<Watch>();
  if (watch == nullptr) {
    watch = std::make_shared<Watch>();
    module.attach(watch);
    module.add_forward_pre_hook([watch](nn::ModuleBase&, nn::TensorList inputs) {
      if (watch->records()) {
        watch->recorder->begin_call(watch->fqn, inputs);
      }
    });
    module.add_forward_hook([watch](nn::ModuleBase&, nn::TensorList outputs) {
      if (watch->records()) {
        watch->recorder->end_call(outputs);
      }
    });
  }
  return *watch;
}

/// While a RecordScope exists, `recorder` records the calls of a module and its submodules.
class RecordScope : tessera::detail::NoCopy {
 public:
  RecordScope(nn::ModuleBase& module, Recorder& recorder) {
    nn::visit_modules(module, [&](const std::string& fqn, nn::ModuleBase& each) {
      watched_.push_back(&watch_of(each));
      *watched_.back() = {&recorder, fqn};
    });
  }
  ~RecordScope() {
    for (Watch* watch : watched_) {
      watch->recorder = nullptr;
    }
  }

 private:
  std::vector<Watch*> watched_;
};

/// Runs the step, and backward if the result requires grad. Returns whether backward ran.
bool run(nn::ModuleBase& module, const VerifyStep& step, Recorder& recorder) {
  const at::Tensor result = step(module);
  const bool trains = result.defined() && result.requires_grad();
  TESSERA_CHECK(!trains || result.numel() == 1, "the step returned a tensor of sizes ",
                result.defined() ? result.sizes() : at::IntArrayRef(),
                " that requires a gradient; return the loss as a scalar tensor, or compute under a "
                "c10::NoGradGuard");
  recorder.run.tensors.push_back({trains ? "loss" : "result of the step", "", copy_of(result)});
  if (trains) {
    result.backward();
  }
  return trains;
}

/// The order in which backward reaches the parameters of the one-rank model. On a mesh no such
/// order exists, because FSDP completes the gradients of a unit together.
class BackwardOrder : tessera::detail::NoCopy {
 public:
  explicit BackwardOrder(const nn::ModuleBase& module) {
    for (const auto& [fqn, slot] : module.named_slots()) {
      const at::Tensor& parameter = slot->persistent();
      if (parameter.requires_grad() && parameter.is_leaf() && !tessera::is_distributed(parameter)) {
        hooks_.emplace_back(parameter, parameter.register_hook([this, name = fqn](at::Tensor) {
          const std::lock_guard lock(mutex_);
          places_.emplace(name, places_.size());
        }));
      }
    }
  }
  ~BackwardOrder() {
    for (const auto& [parameter, hook] : hooks_) {
      parameter.remove_hook(hook);
    }
  }

  void sort(std::vector<SeenTensor>& gradients) const {
    std::ranges::stable_sort(gradients, {}, [this](const SeenTensor& gradient) {
      const auto found = places_.find(gradient.fqn);
      return found == places_.end() ? places_.size() : found->second;
    });
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::size_t> places_;
  std::vector<std::pair<at::Tensor, unsigned>> hooks_;
};

/// Removes and returns the gradients of the parameters that require grad. If only some ranks have a
/// gradient, the gradient counts as zeros on the other ranks.
std::vector<SeenTensor> take_gradients(const nn::ModuleBase& module) {
  std::vector<SeenTensor> gradients;
  for (const auto& [fqn, slot] : module.named_slots()) {
    const at::Tensor& parameter = slot->persistent();
    if (!parameter.requires_grad()) {
      continue;
    }
    at::Tensor gradient = copy_of(parameter.grad());
    if (!gradient.defined() && !tessera::is_distributed(parameter)) {
      gradient = at::zeros_like(parameter.detach());
    }
    gradients.push_back({"gradient of parameter '" + fqn + "'", fqn, std::move(gradient)});
    nn::drop_gradient(*slot);
  }
  return gradients;
}

/// Returns the first line of a libtorch error message, which can have several lines.
std::string first_line(const std::string& message) {
  return message.substr(0, message.find('\n'));
}

/// Runs `step` with `module`, and backward if the result requires grad. Leaves no gradients.
/// Collective if `step` is collective. The Errors name the innermost running module.
SeenRun run_step(nn::ModuleBase& module, const VerifyStep& step) {
  Recorder recorder;
  const BackwardOrder order(module);
  const auto where = [&] { return recorder.running().empty() ? "" : ", in " + recorder.running(); };
  bool trained = false;
  try {
    const RecordScope recording(module, recorder);
    trained = run(module, step, recorder);
  } catch (const comm::PeerError&) {
    throw;
  } catch (const c10::Error& error) {
    fail("the step failed", where(), ": ", first_line(error.what_without_backtrace()));
  } catch (const std::exception& error) {
    fail("the step failed", where(), ": ", first_line(error.what()));
  }
  if (trained) {
    recorder.run.gradients = take_gradients(module);
    order.sort(recorder.run.gradients);
  }
  return std::move(recorder.run);
}

constexpr auto kMakeAnother =
    "; pass a second instance of the same class and options, without parallelism";

void check_slot(const std::string& fqn, const nn::ParameterSlot& slot,
                const nn::ParameterSlot& copy) {
  TESSERA_CHECK(!tessera::is_distributed(copy.persistent()), "verify: '", fqn,
                "' of the reference is a distributed tensor", kMakeAnother);
  TESSERA_CHECK(slot.persistent().sizes() == copy.persistent().sizes(), "verify: '", fqn,
                "' has sizes ", slot.persistent().sizes(), ", but sizes ",
                copy.persistent().sizes(), " in the reference", kMakeAnother);
  TESSERA_CHECK(!slot.distinct_along(), "verify: '", fqn,
                "' is a different parameter on each slice of a mesh (distinct_along), but a "
                "one-rank model has one parameter; verify a model without such parameters");
}

void check_slots(const nn::NamedSlots& slots, const nn::NamedSlots& copies) {
  const auto name_of = [](const nn::NamedSlots& all, std::size_t i) {
    return i < all.size() ? "'" + all[i].first + "'" : std::string("nothing");
  };
  for (std::size_t i = 0; i < std::max(slots.size(), copies.size()); ++i) {
    TESSERA_CHECK(name_of(slots, i) == name_of(copies, i), "verify: the reference has ",
                  name_of(copies, i), " where the module has ", name_of(slots, i), kMakeAnother);
    check_slot(slots[i].first, *slots[i].second, *copies[i].second);
  }
}

void copy_values(const nn::NamedSlots& slots, const nn::NamedSlots& copies) {
  const c10::NoGradGuard no_grad;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const at::Tensor from = slots[i].second->persistent().detach();
    const at::Tensor& to = copies[i].second->get();
    to.detach().copy_(tessera::is_distributed(from) ? DistributedTensor(from).full_tensor() : from);
    copies[i].second->set_initialized(true);
    if (to.is_leaf() && (to.is_floating_point() || to.is_complex())) {
      to.requires_grad_(slots[i].second->persistent().requires_grad());
    }
  }
}

bool has_no_memory(const nn::NamedSlots& slots) {
  return std::ranges::any_of(slots, [](const auto& item) { return item.second->get().is_meta(); });
}

void copy_modes(nn::ModuleBase& module, nn::ModuleBase& reference) {
  std::unordered_map<std::string, torch::nn::Module*> copies;
  nn::visit_modules(reference, [&](const std::string& fqn, torch::nn::Module& copy) {
    copies.emplace(fqn, &copy);
  });
  // A module's mode is set before its submodules' modes, because train() sets all of these modes.
  nn::visit_modules(module, [&](const std::string& fqn, torch::nn::Module& each) {
    const auto found = copies.find(fqn);
    if (found == copies.end()) {
      return;
    }
    found->second->train(each.is_training());
    auto* to = dynamic_cast<nn::Dropout*>(found->second);
    const auto* dropout = dynamic_cast<nn::Dropout*>(&each);
    // A Dropout without an explicit key derives the key from its name. Other keys are copied.
    if (to != nullptr && dropout != nullptr && dropout->key()) {
      to->set_key(*dropout->key());
    }
  });
}

/// Throws Error unless `reference` has the parameters and buffers of `module`, as plain tensors of
/// equal sizes. Not collective.
void check_reference(const nn::ModuleBase& module, const nn::ModuleBase& reference) {
  TESSERA_CHECK(&module != &reference, "verify: the module was passed as its own reference",
                kMakeAnother);
  check_slots(module.named_slots(), reference.named_slots());
  check_slots(module.named_buffer_slots(), reference.named_buffer_slots());
}

/// Copies the values and modes of `module` to `reference`. If `reference` is on the meta device,
/// allocates its memory first. Collective over the meshes of the module's parameters.
void copy_to_reference(nn::ModuleBase& module, nn::ModuleBase& reference, const DeviceMesh& mesh) {
  if (has_no_memory(reference.named_slots()) || has_no_memory(reference.named_buffer_slots())) {
    nn::to_empty(reference, mesh.device());
  }
  copy_values(module.named_slots(), reference.named_slots());
  copy_values(module.named_buffer_slots(), reference.named_buffer_slots());
  copy_modes(module, reference);
}

/// Changes every weight of `reference` by about one unit in the last place, up or down at random.
/// `draw` is the random seed.
void change_last_places(nn::ModuleBase& reference, std::uint64_t draw) {
  const c10::NoGradGuard no_grad;
  for (const auto& [fqn, slot] : reference.named_slots()) {
    const at::Tensor weight = slot->get().detach();
    if (!weight.is_floating_point()) {
      continue;
    }
    const at::Tensor up = at::empty_like(weight);
    bernoulli_(up, 0.5, {.seed = draw, .stream = stream_of(fqn.c_str())});
    weight.mul_(up.mul(2).sub(1).mul(epsilon_of(weight.scalar_type())).add(1));
  }
}

/// How many random draws this rank has made: in each Dropout, and in all at:: operators together.
struct DrawCounts {
  RandomState state;
  std::vector<std::pair<std::string, std::uint64_t>> dropouts;
};

DrawCounts draw_counts(const nn::ModuleBase& module) {
  DrawCounts counts{random_state(), {}};
  nn::visit_modules(module, [&](const std::string& fqn, const nn::ModuleBase& each) {
    if (const auto* dropout = dynamic_cast<const nn::Dropout*>(&each)) {
      counts.dropouts.emplace_back(fqn, dropout->calls());
    }
  });
  return counts;
}

/// Sets the random-draw counts of `module`'s Dropouts and of at:: operators to `counts` + `ahead`.
void set_draw_counts(nn::ModuleBase& module, const DrawCounts& counts, std::uint64_t ahead = 0) {
  set_random_state({counts.state.seed, counts.state.calls + ahead});
  std::unordered_map<std::string, std::uint64_t> calls(counts.dropouts.begin(),
                                                       counts.dropouts.end());
  nn::visit_modules(module, [&](const std::string& fqn, nn::ModuleBase& each) {
    if (auto* dropout = dynamic_cast<nn::Dropout*>(&each)) {
      dropout->set_calls(calls[fqn] + ahead);
    }
  });
}

bool have_drawn(const DrawCounts& counts, const DrawCounts& set, std::uint64_t ahead) {
  return counts.state.calls != set.state.calls + ahead ||
         !std::ranges::equal(counts.dropouts, set.dropouts, [&](const auto& now, const auto& then) {
           return now.second == then.second + ahead;
         });
}

/// Saves everything that a run changes in a module and in the calling thread. The destructor
/// restores the saved state. Between constructor and destructor the parameters have no gradients.
class SavedState : tessera::detail::NoCopy {
 public:
  explicit SavedState(nn::ModuleBase& module)
      : module_(module), counts_(draw_counts(module)), batch_ranks_(nn::batch_ranks()) {
    const c10::NoGradGuard no_grad;
    for (const auto& [fqn, slot] : module.named_slots()) {
      gradients_.emplace_back(slot, slot->persistent().grad());
      nn::drop_gradient(*slot);
    }
    for (const auto& [fqn, slot] : module.named_buffer_slots()) {
      buffers_.emplace_back(slot, slot->get().detach().clone());
    }
  }
  ~SavedState() {
    const c10::NoGradGuard no_grad;
    for (const auto& [slot, gradient] : gradients_) {
      nn::drop_gradient(*slot);
      slot->persistent().mutable_grad() = gradient;
    }
    for (const auto& [slot, values] : buffers_) {
      slot->get().detach().copy_(values);
    }
    set_draw_counts(module_, counts_);
    nn::set_batch_ranks(batch_ranks_);
  }

 private:
  using Values = std::vector<std::pair<nn::SlotPtr, at::Tensor>>;
  nn::ModuleBase& module_;
  Values gradients_, buffers_;
  DrawCounts counts_;
  std::int64_t batch_ranks_;
};

/// verify() adds this number to the counts of random draws. Without the offset, two forwards could
/// have equal counts, as if the model drew no random numbers.
constexpr std::uint64_t kAhead = std::uint64_t{1} << 32;

/// The number of runs with perturbed weights, which measure the rounding noise. With one run, some
/// values can by chance change very little.
constexpr std::uint64_t kDraws = 2;

/// Returns a scope object. While the object exists, random operators know which samples of the
/// whole batch this rank has.
BatchPart part_of_batch(const DeviceMesh& mesh, const VerifyOptions& options) {
  if (options.batch_dims.empty()) {
    return {0, 1};
  }
  const DeviceMesh batches = mesh.slice(options.batch_dims).flatten();
  return {batches.local_rank(), batches.size()};
}

class Verification {
 public:
  Verification(nn::ModuleBase& module, nn::ModuleBase& reference, const DeviceMesh& mesh,
               const VerifyStep& step, const VerifyOptions& options)
      : module_(module), reference_(reference), mesh_(mesh), step_(step), options_(options) {}

  VerifyReport run() {
    on_each_rank([&] {
      nn::check_initialized(module_, "verify");
      check_reference(module_, reference_);
    });
    copy_to_reference(module_, reference_, mesh_);
    if (std::string weights = whether_weights_are_equal(); !weights.empty()) {
      return {.weights = std::move(weights)};
    }
    const SavedState saved(module_);
    counts_ = draw_counts(module_);
    on_each_rank([&] {
      try {
        run_reference();
      } catch (const Error& error) {
        fail("verify: with the reference, ", error.what());
      }
    });
    check_rows();
    const SeenRun on_mesh = run_on_mesh();
    return compare(on_mesh, one_rank_, noise_, mesh_, options_);
  }

 private:
  void on_each_rank(const std::function<void()>& work) const {
    comm::run_or_fail_together(flush_pending_transfers(mesh_.group_of_all_ranks()), mesh_.device(),
                               work);
  }

  /// Returns a message about the first weight that differs between ranks; "" if all are equal.
  std::string whether_weights_are_equal() const {
    const auto check = [](const DeviceMesh& among, const char* kind, const nn::NamedSlots& slots) {
      std::vector<tessera::detail::Replica> copies;
      for (const auto& [fqn, slot] : slots) {
        copies.push_back({std::string(kind) + " '" + fqn + "'", slot->get().detach()});
      }
      tessera::detail::check_replicas(tessera::detail::peers_of(among), copies,
                                      tessera::detail::Equality::kBitwise, "verify",
                                      "give every rank the same values");
    };
    std::string problem;
    try {
      check(mesh_, "parameter", reference_.named_slots());
      // Buffers are compared only between ranks with the same samples, because buffers of a batch
      // norm depend on the samples.
      if (const auto dims = other_dims(mesh_, options_.batch_dims); !dims.empty()) {
        check(mesh_.slice(dims), "buffer", reference_.named_buffer_slots());
      }
    } catch (const comm::PeerError&) {
      throw;
    } catch (const Error& error) {
      problem = error.what();
    }
    return problem_of_first_rank(problem);
  }

  /// Returns the message of the lowest rank that has found a problem. Ranks with other samples can
  /// have found another problem, or no problem.
  std::string problem_of_first_rank(const std::string& own) const {
    comm::Communicator& group = flush_pending_transfers(mesh_.group_of_all_ranks());
    const auto failure =
        comm::first_failure(group, mesh_.device(), [&] { TESSERA_CHECK(own.empty(), own); });
    return failure ? failure->message : "";
  }

  void run_reference() {
    // Losses use the thread's number of data-parallel ranks, which the last forward has set. The
    // reference model runs on one rank, so the number is reset to 1.
    nn::set_batch_ranks(1);
    const auto run = [&] {
      set_draw_counts(reference_, counts_, kAhead);
      const BatchPart part = part_of_batch(mesh_, options_);
      return run_step(reference_, step_);
    };
    one_rank_ = run();
    draws_ = have_drawn(draw_counts(reference_), counts_, kAhead);
    for (std::uint64_t draw = 0; draw < kDraws; ++draw) {
      change_last_places(reference_, draw);
      raise_noise(noise_, one_rank_, run());
    }
  }

  /// Throws Error if the model draws random numbers and the ranks have different numbers of
  /// samples: a sample's random numbers depend on its index in the batch.
  void check_rows() const {
    comm::Communicator& group = flush_pending_transfers(mesh_.group_of_all_ranks());
    const auto all = comm::gather_values(group, mesh_.device(), {one_rank_.rows, draws_ ? 1 : 0});
    const auto other =
        std::ranges::find_if(all, [&](const auto& each) { return each[0] != all.front()[0]; });
    const bool draws = std::ranges::any_of(all, [](const auto& each) { return each[1] != 0; });
    TESSERA_CHECK(
        !draws || other == all.end(), "verify: the model draws random numbers, and rank ",
        mesh_.ranks().front(), " passes ", all.front()[0], " rows to the model, but rank ",
        mesh_.ranks()[static_cast<std::size_t>(other - all.begin())], " passes ", (*other)[0],
        "; pass equally many rows on all ranks, or verify in evaluation mode");
  }

  SeenRun run_on_mesh() {
    try {
      set_draw_counts(module_, counts_, draws_ ? kAhead : 0);
      const BatchPart part = part_of_batch(mesh_, options_);
      return run_step(module_, step_);
    } catch (const comm::PeerError&) {
      throw;
    } catch (const Error& error) {
      fail("verify: on the mesh, ", error.what());
    }
  }

  nn::ModuleBase& module_;
  nn::ModuleBase& reference_;
  const DeviceMesh& mesh_;
  const VerifyStep& step_;
  const VerifyOptions& options_;
  DrawCounts counts_;
  bool draws_ = false;
  SeenRun one_rank_;
  Noise noise_;
};

}  // namespace

VerifyReport verify(nn::ModuleBase& module, nn::ModuleBase& reference, const DeviceMesh& mesh,
                    const VerifyStep& step, const VerifyOptions& options) {
  return Verification(module, reference, mesh, step, options).run();
}

namespace {

/// The maximum number of printed differences. Later differences usually follow from the first.
constexpr std::size_t kLines = 8;

std::string counted(std::size_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string equal_line(const VerifyReport& report) {
  std::string compared = report.modules > 0 ? counted(report.modules, "module") : "the loss";
  if (report.parameters > 0) {
    compared += " and " + counted(report.parameters, "parameter");
  }
  return fmt::format(
      "verify: {} equal one rank's (largest difference {:.2g} of the largest value{})", compared,
      report.largest,
      report.modules > 0 ? "" : "; outputs are not compared, since ranks split the samples");
}

/// Returns advice for the user on where to look for the cause of the first difference.
std::string remedy(const VerifyReport& report) {
  if (!report.cause.empty()) {
    return report.cause;
  }
  return fmt::format(
      "{}so look at what computes this gradient: a to_local() or full_tensor() without "
      "Placements{{Partial{{}}}} where each rank's gradient is one term of a sum, the backward of "
      "your own function, a hook, the parameter's placement in the plan",
      report.modules > 0
          ? "all outputs, and the gradients that backward computes before, are equal, "
          : "the loss, and the gradients that backward computes before, are equal, ");
}

std::string first_line(const VerifyReport& report) {
  if (!report.weights.empty()) {
    return report.weights;
  }
  const bool of_output = !report.outputs.empty();
  const VerifyDifference& first = of_output ? report.outputs.front() : report.gradients.front();
  std::string line = fmt::format("verify: the {}; {}", first.text, remedy(report));
  const std::size_t outputs = report.outputs.size() - (of_output ? 1 : 0);
  const std::size_t gradients = report.gradients.size() - (of_output ? 0 : 1);
  if (outputs + gradients > 0) {
    line += fmt::format(" ({} and {} more differ)", counted(outputs, "output"),
                        counted(gradients, "gradient"));
  }
  return line;
}

void add_lines(std::string& text, const std::vector<VerifyDifference>& differences,
               std::size_t from) {
  const std::size_t end = std::min(differences.size(), from + kLines);
  for (std::size_t i = from; i < end; ++i) {
    text += "\n  the " + differences[i].text;
  }
  if (end < differences.size()) {
    text += fmt::format("\n  and {} more", differences.size() - end);
  }
}

}  // namespace

std::string VerifyReport::text() const {
  if (ok()) {
    return equal_line(*this);
  }
  std::string text = first_line(*this);
  add_lines(text, outputs, 1);
  add_lines(text, gradients, outputs.empty() ? 1 : 0);
  return text;
}

void VerifyReport::check() const {
  TESSERA_CHECK(ok(), first_line(*this));
}

}  // namespace tessera::observe
