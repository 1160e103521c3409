#include "verify/seen_run.h"

#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "tessera/comm/communicator.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/operator_mode.h"
#include "tessera/nn/checkpoint.h"
#include "tessera/nn/detail/slots.h"
#include "tessera/nn/visit_modules.h"

namespace tessera::observe {
namespace {

/// A copy, since the program may write to the tensor. Beside its computation: neither autograd nor
/// selective checkpointing sees it.
at::Tensor copy_of(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  const OperatorModePause no_mode;
  return tensor.defined() ? tensor.detach().clone() : tensor;
}

class Recorder {
 public:
  void begin_call(const std::string& fqn, nn::TensorList inputs) {
    running_.push_back(fqn);
    const auto batch = std::ranges::find_if(
        inputs, [](const at::Tensor* tensor) { return tensor->defined() && tensor->dim() > 0; });
    if (fqn.empty() && batch != inputs.end()) {
      rows = (*batch)->size(0);
    }
  }
  void end_call(const std::string& fqn, nn::TensorList tensors) {
    running_.pop_back();
    const int call = ++calls_[fqn];
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::string number = tensors.size() == 1 ? "" : fmt::format(" {}", i);
      const std::string module = fqn.empty() ? "the model" : "'" + fqn + "'";
      const std::string again = call == 1 ? "" : fmt::format(", call {}", call);
      outputs.push_back(
          {fmt::format("output{} of {}{}", number, module, again), fqn, copy_of(*tensors[i])});
    }
  }

  /// The innermost module that has not ended: "'layers.0.norm'"; empty: none.
  std::string running() const {
    return running_.empty() || running_.back().empty() ? "" : "'" + running_.back() + "'";
  }
  std::vector<SeenTensor> outputs;
  std::int64_t rows = 0;

 private:
  std::vector<std::string> running_;
  std::map<std::string, int> calls_;  // by FQN
};

/// Attached to a module, with hooks that can't be removed: they do nothing without a recorder.
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
        watch->recorder->end_call(watch->fqn, outputs);
      }
    });
  }
  return *watch;
}

/// While it exists, the calls of a module and of all below it go to `recorder`.
class RecordScope {
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
  RecordScope(const RecordScope&) = delete;
  RecordScope& operator=(const RecordScope&) = delete;

 private:
  std::vector<Watch*> watched_;
};

/// Returns whether there was a backward.
bool run(nn::ModuleBase& module, const VerifyStep& step, Recorder& recorder) {
  const at::Tensor result = step(module);
  const bool trains = result.defined() && result.requires_grad();
  TESSERA_CHECK(!trains || result.numel() == 1, "it returned a tensor of sizes ",
                result.defined() ? result.sizes() : at::IntArrayRef(),
                " that has a gradient; return the loss, one number, or compute under a "
                "c10::NoGradGuard");
  recorder.outputs.push_back({trains ? "loss" : "result of the step", "", copy_of(result)});
  if (trains) {
    result.backward();
  }
  return trains;
}

/// The gradients of the trained parameters. One rank's are zeros where there are none.
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

/// Messages of libtorch may have several lines.
std::string first_line(const std::string& message) {
  return message.substr(0, message.find('\n'));
}

}  // namespace

SeenRun run_step(nn::ModuleBase& module, const VerifyStep& step) {
  Recorder recorder;
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
  return {std::move(recorder.outputs), trained ? take_gradients(module) : std::vector<SeenTensor>(),
          recorder.rows};
}

}  // namespace tessera::observe
