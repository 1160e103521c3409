// Default implementations of Communicator's methods: most collectives throw, collectives of several
// tensors pack the tensors into one tensor, and flags are all-reduced.

#include "tessera/comm/communicator.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

namespace tessera::comm {
namespace {

[[noreturn]] void unsupported(const Communicator& communicator, const char* collective) {
  fail(collective, " is not implemented by the communicator '", communicator.name(),
       "'; choose another backend in WorldOptions");
}

/// The Work of a collective on packed tensors. wait() copies the matrix `packed` into the tensors:
/// row r of `packed` contains row r of each tensor, in order.
class UnpackingWork final : public Work {
 public:
  UnpackingWork(WorkPtr work, at::Tensor packed, std::vector<at::Tensor> tensors)
      : work_(std::move(work)), packed_(std::move(packed)), tensors_(std::move(tensors)) {}

  void wait() override {
    if (work_ == nullptr) {
      return;
    }
    std::exchange(work_, nullptr)->wait();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::int64_t offset = 0;
    for (const at::Tensor& tensor : tensors_) {
      const at::Tensor rows = tensor.view({packed_.size(0), -1});
      rows.copy_(packed_.narrow(1, offset, rows.size(1)));
      offset += rows.size(1);
    }
    // The tensors are released, because a Work must not keep memory alive after wait().
    packed_.reset();
    tensors_.clear();
  }

 private:
  WorkPtr work_;
  at::Tensor packed_;
  std::vector<at::Tensor> tensors_;
};

/// Views each contiguous tensor as a matrix of `rows` rows, and concatenates the matrices along the
/// columns.
at::Tensor pack_rows(const std::vector<at::Tensor>& tensors, std::int64_t rows) {
  std::vector<at::Tensor> cut;
  for (const at::Tensor& tensor : tensors) {
    cut.push_back(tensor.reshape({rows, tensor.numel() / rows}));
  }
  return at::cat(cut, 1);
}

}  // namespace

// Packs several tensors into one tensor, so that one collective replaces several. Back ends with
// moves_groups_in_place() need no packing, and override all_gather_group() and
// reduce_scatter_group().
WorkPtr Communicator::all_gather_group(const std::vector<at::Tensor>& outputs,
                                       const std::vector<at::Tensor>& inputs) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor input = pack_rows(inputs, 1);
  const at::Tensor output = at::empty({size(), input.numel()}, input.options());
  return std::make_shared<UnpackingWork>(all_gather(output, input), output, outputs);
}

WorkPtr Communicator::reduce_scatter_group(const std::vector<at::Tensor>& outputs,
                                           const std::vector<at::Tensor>& inputs, ReduceOp op) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor input = pack_rows(inputs, size());
  const at::Tensor output = at::empty({1, input.size(1)}, input.options());
  return std::make_shared<UnpackingWork>(reduce_scatter(output, input, op), output, outputs);
}

WorkPtr Communicator::all_gather(const at::Tensor&, const at::Tensor&) {
  unsupported(*this, "all_gather");
}

WorkPtr Communicator::all_reduce(const at::Tensor&, ReduceOp) {
  unsupported(*this, "all_reduce");
}

WorkPtr Communicator::reduce_scatter(const at::Tensor&, const at::Tensor&, ReduceOp) {
  unsupported(*this, "reduce_scatter");
}

WorkPtr Communicator::all_to_all(const at::Tensor&, const at::Tensor&,
                                 std::span<const std::int64_t>, std::span<const std::int64_t>) {
  unsupported(*this, "all_to_all");
}

WorkPtr Communicator::broadcast(const at::Tensor&, int) {
  unsupported(*this, "broadcast");
}

at::Tensor Communicator::allocate(std::int64_t numel, const c10::TensorOptions& options) {
  return at::empty({numel}, options);
}

// The tensor of from_blob() shares the memory of `flags`, so the all-reduce writes to `flags`.
void Communicator::any_rank(std::span<std::uint8_t> flags) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const auto numel = static_cast<std::int64_t>(flags.size());
  all_reduce(at::from_blob(flags.data(), {numel}, at::kByte), ReduceOp::kMax)->wait();
}

void Communicator::barrier() {
  unsupported(*this, "barrier");
}

}  // namespace tessera::comm
