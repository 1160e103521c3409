#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "memory/buffer_pool.h"
#include "tessera/comm/streams.h"
#include "tessera/dtensor/detail/deferred_sums.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::fsdp {

class GradientState;
class ParameterGroup;
class ShardedParameter;

/// What units use to communicate: the streams, the buffers, and the reductions under way. All units
/// of a model share one, and several models may.
class CommContext {
 public:
  CommContext(comm::StreamsPtr streams, c10::Device device)
      : streams_(std::move(streams)), pool_(streams_, device) {}

  comm::Streams& streams() { return *streams_; }
  BufferPool& pool() { return pool_; }
  tessera::detail::DeferredSums& sums() { return sums_; }

  /// Starts the reduction of these groups. Finishes those started before first, so that at most one
  /// unit's gradients are being reduced.
  void reduce(std::vector<ParameterGroup>& groups);
  /// Hands out the gradients whose reduction is under way.
  void finish_reductions();
  /// Finishes everything: gradients may be used on the compute lane and, if they are copied to the
  /// host, by the host. Keeps no buffer.
  void settle();
  /// Forgets what these groups have under way: their backward failed, or they are about to go.
  void forget(std::vector<ParameterGroup>& groups);

  /// The reduced gradient of this parameter is copied to the host: settle() waits for the copy, and
  /// notifies the parameter.
  void expect_on_host(ShardedParameter& parameter) { on_host_.push_back(&parameter); }
  /// Keeps tensors of the compute lane, which another lane uses until `event`, for as long.
  void retire(std::vector<at::Tensor> tensors, comm::StreamEventPtr event);
  /// A hook works in its own lane, until `event`, with reduced gradients: `tensors` of the lane
  /// `owner`. Keeps them until the owner has waited for it, when the next reductions are finished
  /// or all are settled.
  void await_hook(std::vector<at::Tensor> tensors, comm::Lane owner, comm::StreamEventPtr event);

 private:
  struct Retired {
    std::vector<at::Tensor> tensors;
    comm::StreamEventPtr event;
  };
  struct Hooked {
    std::vector<at::Tensor> tensors;
    comm::Lane owner;
    comm::StreamEventPtr event;
  };
  void free_retired();
  void join_hooks();

  comm::StreamsPtr streams_;
  BufferPool pool_;
  std::vector<GradientState*> reducing_;
  std::vector<Retired> retired_;
  std::vector<Hooked> hooked_;
  tessera::detail::DeferredSums sums_;
  std::vector<ShardedParameter*> on_host_;
};
using CommContextPtr = std::shared_ptr<CommContext>;

}  // namespace tessera::fsdp
TESSERA_API_FOR_TEST_END
