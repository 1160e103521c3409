#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "testing/forwarding_communicator.h"
#include "testing/ranks.h"

namespace tessera::testing {

/// The stages at which a rank can be late.
enum class Stage { kNone, kForward, kBackward, kAllGather, kReduceScatter, kAllReduce, kStep };

inline std::string to_string(Stage stage) {
  constexpr const char* kNames[] = {"None",          "Forward",   "Backward", "AllGather",
                                    "ReduceScatter", "AllReduce", "Step"};
  return kNames[static_cast<int>(stage)];
}

/// Makes a rank late each time that it reaches one stage: always the same rank, or the ranks in
/// turn. Each rank has one, and reaches the stage equally often.
class Lateness {
 public:
  Lateness(const Rank& rank, Stage stage, std::chrono::milliseconds delay,
           std::optional<int> late_rank = std::nullopt)
      : rank_(rank), stage_(stage), delay_(delay), late_rank_(late_rank) {}

  /// This rank reaches a stage.
  void pass(Stage stage) {
    if (stage != stage_) {
      return;
    }
    const int late = late_rank_.value_or(passed_ % rank_.size());
    ++passed_;
    if (rank_.rank() == late) {
      std::this_thread::sleep_for(delay_);
    }
  }
  /// How often this rank came to the stage.
  int passed() const { return passed_; }

  /// This rank's world, in which collectives with a purpose reach their stages. `this` must outlive
  /// it.
  comm::WorldPtr world() {
    return std::make_shared<WrappedWorld>(
        rank_.world(), [this](comm::CommunicatorPtr group, const std::string&) {
          return comm::CommunicatorPtr(std::make_shared<Late>(std::move(group), *this));
        });
  }

 private:
  class Late final : public ForwardingCommunicator {
   public:
    Late(comm::CommunicatorPtr inner, Lateness& lateness)
        : ForwardingCommunicator(std::move(inner)), lateness_(lateness) {}

    comm::WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
      be_late(Stage::kAllGather);
      return inner().all_gather(output, input);
    }
    comm::WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                                   const std::vector<at::Tensor>& inputs) override {
      be_late(Stage::kAllGather);
      return inner().all_gather_group(outputs, inputs);
    }
    comm::WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
      be_late(Stage::kAllReduce);
      return inner().all_reduce(tensor, op);
    }
    comm::WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                 ReduceOp op) override {
      be_late(Stage::kReduceScatter);
      return inner().reduce_scatter(output, input, op);
    }
    comm::WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                                       const std::vector<at::Tensor>& inputs,
                                       ReduceOp op) override {
      be_late(Stage::kReduceScatter);
      return inner().reduce_scatter_group(outputs, inputs, op);
    }

   private:
    void be_late(Stage stage) {
      if (!purpose().empty()) {
        lateness_.pass(stage);
      }
    }

    Lateness& lateness_;
  };

  Rank rank_;
  Stage stage_;
  std::chrono::milliseconds delay_;
  std::optional<int> late_rank_;
  int passed_ = 0;
};

}  // namespace tessera::testing
