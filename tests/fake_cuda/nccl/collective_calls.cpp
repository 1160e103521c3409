// ncclAllGather and its like.
#include <nccl.h>

#include "nccl/launch.h"
#include "nccl/reduction.h"
#include "record/record.h"
#include "runtime/memory.h"

namespace fake_cuda {
namespace {

ncclResult_t move(Collective collective, const void* send, void* receive, std::size_t count,
                  ncclDataType_t type, int root, ncclComm_t communicator, cudaStream_t stream) {
  return call({.collective = collective,
               .send = send,
               .receive = receive,
               .count = count,
               .type = type,
               .op = ncclSum,
               .root = root,
               .communicator = find(communicator),
               .stream = find_stream(stream)});
}

ncclResult_t reduce(Collective collective, const void* send, void* receive, std::size_t count,
                    ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t communicator,
                    cudaStream_t stream) {
  if (!can_reduce(type, op)) {
    return ncclInvalidArgument;
  }
  return call({.collective = collective,
               .send = send,
               .receive = receive,
               .count = count,
               .type = type,
               .op = op,
               .root = root,
               .communicator = find(communicator),
               .stream = find_stream(stream)});
}

}  // namespace
}  // namespace fake_cuda

using namespace fake_cuda;

extern "C" {

ncclResult_t ncclAllGather(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           ncclComm_t communicator, cudaStream_t stream) {
  return move(Collective::kAllGather, send, receive, count, type, 0, communicator, stream);
}

ncclResult_t ncclAlltoAll(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                          ncclComm_t communicator, cudaStream_t stream) {
  return move(Collective::kAllToAll, send, receive, count, type, 0, communicator, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t communicator, cudaStream_t stream) {
  return move(Collective::kBroadcast, send, receive, count, type, root, communicator, stream);
}

ncclResult_t ncclBcast(void* buffer, std::size_t count, ncclDataType_t type, int root,
                       ncclComm_t communicator, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, communicator, stream);
}

ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t communicator, cudaStream_t stream) {
  return move(Collective::kSend, send, nullptr, count, type, peer, communicator, stream);
}

ncclResult_t ncclRecv(void* receive, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t communicator, cudaStream_t stream) {
  return move(Collective::kReceive, nullptr, receive, count, type, peer, communicator, stream);
}

ncclResult_t ncclAllReduce(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t communicator, cudaStream_t stream) {
  return reduce(Collective::kAllReduce, send, receive, count, type, op, 0, communicator, stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, std::size_t count,
                               ncclDataType_t type, ncclRedOp_t op, ncclComm_t communicator,
                               cudaStream_t stream) {
  return reduce(Collective::kReduceScatter, send, receive, count, type, op, 0, communicator,
                stream);
}

ncclResult_t ncclReduce(const void* send, void* receive, std::size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t communicator, cudaStream_t stream) {
  return reduce(Collective::kReduce, send, receive, count, type, op, root, communicator, stream);
}

// The factor is read at the call: on the fake, memory of a device can be.
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* factor, ncclDataType_t type,
                                      ncclScalarResidence_t, ncclComm_t) {
  *op = make_scaled_sum(number_at(view_of(factor), type));
  return ncclSuccess;
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) {
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** pointer, std::size_t bytes) {
  count_call("ncclMemAlloc");
  return cudaMalloc(pointer, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void* pointer) {
  count_call("ncclMemFree");
  return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

}  // extern "C"
