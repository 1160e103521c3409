// llama_train with an intentional error. Tensor parallelism sums the gradients of all norms over
// the ranks in one all-reduce. This program leaves one norm out of the all-reduce.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "examples/llama/cli.h"
#include "examples/llama/start.h"
#include "examples/llama/train/run.h"
#include "testing/forwarding_communicator.h"

namespace {

using namespace tessera;

class Done final : public comm::Work {
  void wait() override {}
};

/// Leaves one norm out of every all-reduce with as many elements as all norms together. Suitable
/// batch and sequence sizes avoid other all-reduces of this size.
class UnsummedNorm final : public testing::ForwardingCommunicator {
 public:
  UnsummedNorm(comm::CommunicatorPtr inner, std::int64_t norms, std::int64_t elements)
      : ForwardingCommunicator(std::move(inner)), norms_(norms), elements_(elements) {}

  comm::WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    if (tensor.numel() != norms_ * elements_) {
      return inner().all_reduce(tensor, op);
    }
    const at::Tensor one = tensor.view(-1).slice(0, 0, elements_);
    const at::Tensor own = one.clone();
    inner().all_reduce(tensor, op)->wait();
    one.copy_(own);
    return std::make_shared<Done>();
  }

 private:
  std::int64_t norms_;
  std::int64_t elements_;
};

int train(std::vector<std::string> arguments) {
  const llama::TrainOptions options = llama::parse_train_options(std::move(arguments));
  const comm::WorldScope scope(comm::world_from_environment());
  const llama::Config config =
      llama::read_config(options.model.empty() ? options.config : options.model + "/config.json");
  const auto wrap = [&](comm::CommunicatorPtr group,
                        const std::string& name) -> comm::CommunicatorPtr {
    if (name != "tp" || group->size() == 1) {
      return group;
    }
    const std::int64_t norms = 2 * config.num_hidden_layers + 1;
    return std::make_shared<UnsummedNorm>(std::move(group), norms, config.hidden_size / options.dp);
  };
  llama::train(options, std::make_shared<testing::WrappedWorld>(scope.world(), wrap));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return llama::run_program("llama_unsummed_norm", argc, argv, train);
}
