// What the tests of the fake share.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <future>
#include <vector>

namespace fake_cuda {

inline void expect_ok(cudaError_t error) {
  EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
}

inline cudaStream_t new_stream(int priority = 0) {
  cudaStream_t stream = nullptr;
  expect_ok(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
  return stream;
}

inline cudaEvent_t new_event() {
  cudaEvent_t event = nullptr;
  expect_ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  return event;
}

/// Memory of a device; on the fake, the host can read and write it.
template <class T>
T* on_device(const std::vector<T>& values) {
  void* pointer = nullptr;
  expect_ok(cudaMalloc(&pointer, values.size() * sizeof(T)));
  std::memcpy(pointer, values.data(), values.size() * sizeof(T));
  return static_cast<T*>(pointer);
}

template <class T>
std::vector<T> values_of(const T* pointer, std::size_t count) {
  return {pointer, pointer + count};
}

/// Work of a stream that ends only after open(), as a long kernel does.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    expect_ok(cudaLaunchHostFunc(
        stream, [](void* gate) { static_cast<Gate*>(gate)->opened_.get_future().wait(); }, this));
  }
  void open() { opened_.set_value(); }

 private:
  std::promise<void> opened_;
};

}  // namespace fake_cuda
