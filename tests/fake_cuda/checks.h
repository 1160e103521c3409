// Helpers of the fake's tests.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

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

template <class T>
void write(T* pointer, const std::vector<T>& values) {
  expect_ok(cudaMemcpy(pointer, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
}

/// Allocates device memory with these values.
template <class T>
T* on_device(const std::vector<T>& values) {
  void* pointer = nullptr;
  expect_ok(cudaMalloc(&pointer, values.size() * sizeof(T)));
  write(static_cast<T*>(pointer), values);
  return static_cast<T*>(pointer);
}

template <class T>
std::vector<T> values_of(const T* pointer, std::size_t count) {
  std::vector<T> values(count);
  expect_ok(cudaMemcpy(values.data(), pointer, count * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

template <class T>
T value_of(const T* pointer) {
  return values_of(pointer, 1).front();
}

/// Blocks a stream until open(), like a long kernel.
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
