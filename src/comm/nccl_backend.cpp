// Part of libtessera_cuda.so: see cuda_backend.h.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <future>
#include <thread>
#include <type_traits>

#include "c10d_arguments.h"
#include "cuda_backend.h"
#include "cuda_streams.h"
#include "local_reduce.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

std::vector<at::Tensor> all_as_bytes(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> bytes;
  for (const at::Tensor& tensor : tensors) bytes.push_back(as_bytes(tensor));
  return bytes;
}

std::vector<at::Tensor> all_flat(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& tensor : tensors) flat.push_back(tensor.view({-1}));
  return flat;
}

class NcclWork final : public Work {
 public:
  NcclWork(std::shared_ptr<const GroupInfo> group, std::string collective,
           c10::intrusive_ptr<c10d::Work> work)
      : group_(std::move(group)), collective_(std::move(collective)), work_(std::move(work)) {}

  void wait() override {
    try {
      work_->wait();
    } catch (const std::exception& error) {
      throw PeerError(describe(*group_, collective_.c_str()) + ": " + first_line(error.what()) +
                      "; look for the first error among the other ranks");
    }
  }

 private:
  std::shared_ptr<const GroupInfo> group_;
  std::string collective_;
  c10::intrusive_ptr<c10d::Work> work_;
};

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const c10::intrusive_ptr<c10d::Store>& store, const GroupInfo& group)
      : Communicator(group.rank, group.size()), group_(std::make_shared<const GroupInfo>(group)) {
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = group.timeout;
    process_group_ =
        c10::make_intrusive<c10d::ProcessGroupNCCL>(store, group.rank, group.size(), options);
  }

  // Types that NCCL does not know still move: as bytes.
  WorkPtr all_gather(const at::Tensor& output, const at::Tensor& input) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor to = as_bytes(output);
    at::Tensor from = as_bytes(input);
    return run("all_gather", [&](auto& group) { return group._allgather_base(to, from); });
  }

  WorkPtr all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    std::vector<at::Tensor> tensors = {tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = to_c10d(op);
    return run("all_reduce", [&](auto& group) { return group.allreduce(tensors, options); });
  }

  WorkPtr reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor to = output.view({-1});
    at::Tensor from = input.view({-1});
    c10d::ReduceScatterOptions options;
    options.reduceOp = to_c10d(op);
    return run("reduce_scatter",
               [&](auto& group) { return group._reduce_scatter_base(to, from, options); });
  }

  WorkPtr all_gather_group(const std::vector<at::Tensor>& outputs,
                           const std::vector<at::Tensor>& inputs) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::vector<at::Tensor> to = all_as_bytes(outputs);
    std::vector<at::Tensor> from = all_as_bytes(inputs);
    return run("all_gather",
               [&](auto& group) { return group.allgather_into_tensor_coalesced(to, from); });
  }

  WorkPtr reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                               const std::vector<at::Tensor>& inputs, ReduceOp op) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::vector<at::Tensor> to = all_flat(outputs);
    std::vector<at::Tensor> from = all_flat(inputs);
    c10d::ReduceScatterOptions options;
    options.reduceOp = to_c10d(op);
    return run("reduce_scatter", [&](auto& group) {
      return group.reduce_scatter_tensor_coalesced(to, from, options);
    });
  }

  bool moves_groups_in_place() const override { return true; }

  WorkPtr all_to_all(const at::Tensor& output, const at::Tensor& input,
                     std::span<const std::int64_t> output_counts,
                     std::span<const std::int64_t> input_counts) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::Tensor to = as_bytes(output);
    at::Tensor from = as_bytes(input);
    auto receives = counts_in_bytes(output_counts, output.element_size());
    auto sends = counts_in_bytes(input_counts, input.element_size());
    return run("all_to_all",
               [&](auto& group) { return group.alltoall_base(to, from, receives, sends); });
  }

  WorkPtr broadcast(const at::Tensor& tensor, int root) override {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::vector<at::Tensor> tensors = {as_bytes(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return run("broadcast", [&](auto& group) { return group.broadcast(tensors, options); });
  }

  // The memory pool registers what it holds with the communicator, which must be there by then.
  at::Tensor allocate(std::int64_t numel, const c10::TensorOptions& options) override {
    const at::Device device = options.device();
    if (!device.is_cuda() || !process_group_->supportsTensorAlloc(device.index())) {
      return Communicator::allocate(numel, options);
    }
    return guarded("allocate", [&](auto& group) {
      if (!group.isInitialized()) group.eagerConnectSingleDevice(device);
      return group.allocateTensor(numel, options);
    });
  }

  void barrier() override {
    c10d::BarrierOptions options;
    options.device = at::Device(at::kCUDA, c10::cuda::current_device());
    run("barrier", [&](auto& group) { return group.barrier(options); })->wait();
  }

  void abort() override {
    // NCCL's abort is known to hang: it gets a thread and a little time.
    constexpr std::chrono::seconds kPatience{2};
    std::packaged_task<void()> task([group = process_group_] { group->abort(); });
    const std::future<void> done = task.get_future();
    std::thread(std::move(task)).detach();
    done.wait_for(kPatience);
  }

  std::string name() const override { return "nccl"; }

 private:
  template <class Start>
  WorkPtr run(const char* collective, Start&& start) {
    return std::make_shared<NcclWork>(group_, with_purpose(collective, purpose()),
                                      guarded(collective, start));
  }

  /// Asks something of the process group, whose errors become ours.
  template <class Ask>
  std::invoke_result_t<Ask&, c10d::ProcessGroupNCCL&> guarded(const char* what, Ask&& ask) {
    try {
      return ask(*process_group_);
    } catch (const std::exception& error) {
      fail(describe(*group_, with_purpose(what, purpose()).c_str()), ": ", first_line(error.what()),
           "; NCCL_DEBUG=INFO shows more");
    }
  }

  std::shared_ptr<const GroupInfo> group_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> process_group_;
};

int device_count() {
  return c10::cuda::device_count();
}

void set_device(int index) {
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(index));
}

CommunicatorPtr make_nccl_communicator(const c10::intrusive_ptr<c10d::Store>& store,
                                       const GroupInfo& group) {
  return std::make_shared<NcclCommunicator>(store, group);
}

constexpr CudaBackend kBackend{device_count, set_device, make_nccl_communicator, make_cuda_streams};

}  // namespace
}  // namespace tessera::comm

extern "C" const tessera::comm::CudaBackend* tessera_cuda_backend() {
  return &tessera::comm::kBackend;
}
