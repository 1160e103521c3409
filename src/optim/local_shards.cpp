#include "local_shards.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/core/detail/rounding.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/make_distributed.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/detail/slots.h"

namespace tessera::optim {
namespace {

struct Piece {
  c10::IntArrayRef sizes;
  c10::Device device;
  c10::ScalarType dtype;
};

/// A buffer for several tensors of one dtype on one device. `numel`: the elements counted so far
/// (first pass of zeros()), or the elements that have views (second pass).
struct Buffer {
  c10::Device device;
  c10::ScalarType dtype;
  std::int64_t numel = 0;
  at::Tensor memory = {};
};

/// The alignment of state tensors in bytes. The sizes of joined shards are multiples of this
/// alignment, so the states of joined shards are adjacent too.
constexpr std::int64_t kStateAlignment = 16;

/// Makes tensors of zeros, with one allocation for each dtype and device. The first pass adds up
/// sizes; the second pass makes views.
std::vector<at::Tensor> zeros(const std::vector<Piece>& pieces, std::int64_t alignment) {
  std::vector<Buffer> buffers;
  const auto buffer_of = [&](const Piece& piece) -> Buffer& {
    const auto found = std::ranges::find_if(buffers, [&](const Buffer& buffer) {
      return buffer.device == piece.device && buffer.dtype == piece.dtype;
    });
    return found != buffers.end() ? *found
                                  : buffers.emplace_back(Buffer{piece.device, piece.dtype});
  };
  const auto room_of = [&](const Piece& piece, std::int64_t numel) {
    const auto bytes = static_cast<std::int64_t>(c10::elementSize(piece.dtype));
    return tessera::detail::round_up(numel, std::max<std::int64_t>(1, alignment / bytes));
  };
  for (const Piece& piece : pieces) {
    buffer_of(piece).numel += room_of(piece, c10::multiply_integers(piece.sizes));
  }
  for (Buffer& buffer : buffers) {
    buffer.memory = at::zeros({buffer.numel}, at::dtype(buffer.dtype).device(buffer.device));
    buffer.numel = 0;
  }
  std::vector<at::Tensor> tensors;
  for (const Piece& piece : pieces) {
    Buffer& buffer = buffer_of(piece);
    const std::int64_t numel = c10::multiply_integers(piece.sizes);
    tensors.push_back(buffer.memory.narrow(0, buffer.numel, numel).view(piece.sizes));
    buffer.numel += room_of(piece, numel);
  }
  return tensors;
}

}  // namespace

/// Redistributes a Partial gradient. The result replaces `.grad`, so that clipping and the step
/// reduce the gradient only once.
at::Tensor slot_gradient(const nn::ParameterSlot& slot) {
  const at::Tensor& parameter = slot.persistent();
  const at::Tensor& grad = parameter.grad();
  if (!grad.defined()) {
    return grad;
  }
  if (const nn::PlaceholderGradient* waiting = nn::placeholder(grad)) {
    waiting->refuse();
  }
  TESSERA_CHECK(tessera::is_distributed(grad) == tessera::is_distributed(parameter),
                nn::describe(slot), " is ",
                tessera::is_distributed(parameter)
                    ? "distributed, but its gradient is plain; compute the loss with the tensor "
                      "that the slot holds"
                    : "plain, but its gradient is distributed, because distributed tensors "
                      "computed it; add the parameter's module to the plan of parallelize_module "
                      "(replicate_parallel), or call nn::distribute_parameter");
  if (!tessera::is_distributed(grad) || sharding_spec(grad) == sharding_spec(parameter)) {
    return grad;
  }
  // The redistributed gradient must not have a grad_fn, which would keep the graph in memory.
  const c10::AutoGradMode no_grad(false);
  at::Tensor aligned =
      DistributedTensor(grad).redistribute(sharding_spec(parameter).layout).tensor();
  parameter.mutable_grad() = aligned;
  return aligned;
}

/// Compares storage and offset, not addresses: two allocations can be adjacent by chance, but must
/// not be joined.
bool adjoins(const at::Tensor& first, const at::Tensor& next) {
  return first.storage().is_alias_of(next.storage()) && first.scalar_type() == next.scalar_type() &&
         first.is_contiguous() && next.is_contiguous() &&
         next.storage_offset() == first.storage_offset() + first.numel();
}

/// Autograd is bypassed, because autograd rejects writes to a view of a leaf.
at::Tensor flat_view(const at::Tensor& first, std::int64_t numel) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::as_strided(first, {numel}, {1}, first.storage_offset());
}

std::vector<at::Tensor> merge_adjoining(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> runs;
  for (std::size_t i = 0; i < tensors.size();) {
    std::int64_t numel = tensors[i].numel();
    std::size_t end = i + 1;
    for (; end < tensors.size() && adjoins(tensors[end - 1], tensors[end]); ++end) {
      numel += tensors[end].numel();
    }
    runs.push_back(end == i + 1 ? tensors[i] : flat_view(tensors[i], numel));
    i = end;
  }
  return runs;
}

/// `factor` is a tensor: if it were a C++ number, the host would have to wait for the GPU.
void scale_by(const std::vector<at::Tensor>& tensors, const at::Tensor& factor) {
  // A list kernel needs tensors of one dtype on one device.
  std::map<std::pair<c10::DeviceType, c10::ScalarType>, std::vector<at::Tensor>> lists;
  for (const at::Tensor& tensor : tensors) {
    lists[{tensor.device().type(), tensor.scalar_type()}].push_back(tensor);
  }
  for (const auto& [kind, list] : lists) {
    const bool wide = c10::toRealValueType(kind.second) == c10::ScalarType::Double;
    at::_foreach_mul_(
        list, factor.to(list[0].device(), wide ? c10::ScalarType::Double : c10::ScalarType::Float));
  }
}

/// Returns the dtype in which libtorch's kernels compute for tensors of dtype `dtype`.
c10::ScalarType update_type(c10::ScalarType dtype) {
  return at::toOpMathType(dtype);
}

std::vector<at::Tensor> zeros_beside(const std::vector<at::Tensor>& tensors,
                                     const std::vector<c10::ScalarType>& dtypes) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    pieces.push_back({tensors[i].sizes(), tensors[i].device(), dtypes[i]});
  }
  return zeros(pieces, kStateAlignment);
}

/// Fused kernels read the step counters on the device of the shards. The step counters on one
/// device are contiguous, so that one operator increments all step counters.
std::vector<at::Tensor> counters_beside(const std::vector<at::Tensor>& tensors) {
  std::vector<Piece> pieces;
  for (const at::Tensor& tensor : tensors) {
    pieces.push_back({{}, tensor.device(), c10::ScalarType::Float});
  }
  return zeros(pieces, /*alignment=*/1);
}

/// The state of a plain parameter is a plain tensor. The result shares memory with `state`, so that
/// loading a checkpoint into the result changes `state`.
at::Tensor with_layout_of(const at::Tensor& parameter, const at::Tensor& state) {
  if (!tessera::is_distributed(parameter)) {
    return state;
  }
  return make_distributed(state, sharding_spec(parameter), parameter.sizes().vec());
}

}  // namespace tessera::optim
