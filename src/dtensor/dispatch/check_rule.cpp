// Implements check_rule: runs an operator on every combination of placements of its arguments, and
// compares the results with those of the operator on plain tensors. Each rank is a thread, and all
// ranks get the same plain arguments.

#include "tessera/dtensor/check_rule.h"

#include <ATen/core/stack.h>
#include <ATen/ops/allclose.h>
#include <c10/core/GradMode.h>

#include <exception>
#include <string>
#include <thread>

#include "operators/operator_info.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/strict_scope.h"
#include "tessera/kernels/detail/tensors_in_values.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {
namespace {

using Values = std::vector<c10::IValue>;

std::vector<ReduceOp> reductions_of(c10::ScalarType type) {
  if (c10::isComplexType(type)) {
    return {ReduceOp::kSum, ReduceOp::kAvg};
  }
  if (c10::isFloatingType(type)) {
    return {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin};
  }
  return type == c10::kBool ? std::vector{ReduceOp::kMax, ReduceOp::kMin}
                            : std::vector{ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin};
}

std::vector<Placement> placements_of(const at::Tensor& tensor) {
  std::vector<Placement> all{Replicate{}};
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    all.emplace_back(Shard{dim});
  }
  for (const ReduceOp op : reductions_of(tensor.scalar_type())) {
    all.emplace_back(Partial{op});
  }
  return all;
}

std::vector<at::Tensor> tensors_in(const Values& values) {
  std::vector<at::Tensor> tensors;
  kernels::visit_tensors(values, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

/// The tensors in the operator's results, and its tensor arguments, to which the operator may have
/// written.
std::vector<at::Tensor> outcome_of(const c10::OperatorHandle& op, const Values& arguments) {
  torch::jit::Stack stack(arguments.begin(), arguments.end());
  op.callBoxed(stack);
  std::vector<at::Tensor> tensors = tensors_in(stack);
  for (const at::Tensor& argument : tensors_in(arguments)) {
    tensors.push_back(argument);
  }
  return tensors;
}

Values cloned(const Values& values) {
  Values copies;
  for (const c10::IValue& value : values) {
    copies.push_back(
        kernels::with_tensors(value, [](const at::Tensor& tensor) { return tensor.clone(); }));
  }
  return copies;
}

/// The part of check_rule that each rank runs. Every rank tries the same combinations.
class Trial {
 public:
  Trial(const c10::OperatorHandle& op, const Values& arguments)
      : op_(op), arguments_(cloned(arguments)) {
    expected_ = outcome_of(op, cloned(arguments_));
    for (const at::Tensor& tensor : tensors_in(arguments_)) {
      choices_.push_back(placements_of(tensor));
    }
  }

  int run(const DeviceMesh& mesh) const {
    std::vector<std::size_t> chosen(choices_.size(), 0);
    int accepted = 0;
    do {
      accepted += try_combination(mesh, chosen) ? 1 : 0;
    } while (advance(chosen));
    return accepted;
  }

 private:
  /// Advances `chosen` to the next combination of placements, like an odometer. Returns false after
  /// the last combination.
  bool advance(std::vector<std::size_t>& chosen) const {
    for (std::size_t i = chosen.size(); i-- > 0;) {
      if (++chosen[i] < choices_[i].size()) {
        return true;
      }
      chosen[i] = 0;
    }
    return false;
  }

  /// Whether the rule accepts one combination of placements without redistribution.
  bool try_combination(const DeviceMesh& mesh, const std::vector<std::size_t>& chosen) const {
    Values distributed;
    Placements placements;
    for (const c10::IValue& value : arguments_) {
      distributed.push_back(kernels::with_tensors(value, [&](const at::Tensor& tensor) {
        const std::size_t i = placements.size();
        placements.push_back(choices_[i][chosen[i]]);
        return distribute_tensor(tensor.clone(), mesh, {placements[i]}).tensor();
      }));
    }
    const std::string where = detail::concat("check_rule: ", detail::operator_info(op_).name,
                                             " of ", to_string(placements));
    const std::int64_t moved = implicit_redistributions();
    const std::vector<at::Tensor> found = call(where, distributed);
    if (implicit_redistributions() != moved) {
      return false;
    }
    compare(where, found);
    return true;
  }

  std::vector<at::Tensor> call(const std::string& where, const Values& arguments) const {
    try {
      return outcome_of(op_, arguments);
    } catch (const comm::PeerError&) {
      throw;
    } catch (const c10::Error& error) {
      fail(where, " throws: ", error.what_without_backtrace());
    } catch (const Error& error) {
      fail(where, " throws: ", error.what());
    }
  }

  void compare(const std::string& where, const std::vector<at::Tensor>& found) const {
    TESSERA_CHECK(found.size() == expected_.size(), where, " gives ", found.size(),
                  " tensors, plain ones ", expected_.size());
    for (std::size_t i = 0; i < found.size(); ++i) {
      const at::Tensor whole =
          tessera::is_distributed(found[i]) ? DistributedTensor(found[i]).full_tensor() : found[i];
      TESSERA_CHECK(whole.sizes() == expected_[i].sizes(), where, ": result ", i, " is ",
                    whole.sizes(), ", but ", expected_[i].sizes(), " of plain tensors");
      TESSERA_CHECK(at::allclose(whole, expected_[i], 1e-5, 1e-8, /*equal_nan=*/true), where,
                    ": result ", i, placement_of(found[i]),
                    " has other values than of plain tensors: the rule is wrong where it accepts "
                    "these placements, or the kernel for such shards");
    }
  }

  static std::string placement_of(const at::Tensor& tensor) {
    return tessera::is_distributed(tensor)
               ? ", as " + to_string(DistributedTensor(tensor).placements()) + ","
               : "";
  }

  const c10::OperatorHandle& op_;
  Values arguments_;
  std::vector<at::Tensor> expected_;
  std::vector<std::vector<Placement>> choices_;  // placements to try, for each tensor argument
};

/// What one rank found.
struct Verdict {
  int accepted = 0;
  std::exception_ptr error;
  std::exception_ptr echo;  ///< an error that follows from another rank's
};

Verdict run_rank(const Trial& trial, const comm::WorldPtr& world) {
  const c10::NoGradGuard no_grad;
  Verdict verdict;
  try {
    verdict.accepted = trial.run(init_device_mesh(world, {world->size()}, {"ranks"}));
    return verdict;
  } catch (const comm::PeerError&) {
    verdict.echo = std::current_exception();
  } catch (...) {
    verdict.error = std::current_exception();
  }
  world->abort();
  return verdict;
}

}  // namespace

int check_rule(std::string_view op, const std::vector<c10::IValue>& arguments, int ranks) {
  const c10::NoGradGuard no_grad;
  const c10::OperatorHandle handle = detail::find_operator(op);
  TESSERA_CHECK(handle.schema().arguments().size() == arguments.size(), "check_rule: ", op,
                " takes ", handle.schema().arguments().size(), " arguments, ", arguments.size(),
                " were given; give those with defaults as well");
  TESSERA_CHECK(!detail::operator_info(handle).draws_random, "check_rule: ", op,
                " draws random numbers, which differ from call to call");
  const Trial trial(handle, arguments);
  std::vector<Verdict> verdicts(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (const comm::WorldPtr& world : comm::thread_worlds(ranks)) {
    threads.emplace_back(
        [&, world] { verdicts[static_cast<std::size_t>(world->rank())] = run_rank(trial, world); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const auto failure : {&Verdict::error, &Verdict::echo}) {
    for (const Verdict& verdict : verdicts) {
      if (verdict.*failure) {
        std::rethrow_exception(verdict.*failure);
      }
    }
  }
  return verdicts.front().accepted;
}

}  // namespace tessera
