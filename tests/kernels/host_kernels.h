#pragma once

#include <ATen/Context.h>
#include <c10/core/ScalarType.h>
#include <gtest/gtest.h>

#include <future>
#include <optional>
#include <string>
#include <thread>

namespace tessera::kernels {

/// While a KernelsOnHost exists, operators on CPU tensors run CUDA kernel bodies on the host. Tests
/// with a KernelsOnHost must use one thread.
class KernelsOnHost {
 public:
  KernelsOnHost();
  ~KernelsOnHost();
  KernelsOnHost(const KernelsOnHost&) = delete;
  KernelsOnHost& operator=(const KernelsOnHost&) = delete;

 private:
  std::promise<void> end_;
  std::thread thread_;
};

/// A test parameter: the element type, and whether CUDA kernel bodies run (on the host).
struct KernelForm {
  at::ScalarType type = at::kFloat;
  bool on_device = false;
};

/// The base class of tests that run for each KernelForm. CUDA has no fp64 kernels.
class EachForm : public ::testing::TestWithParam<KernelForm> {
 protected:
  static at::ScalarType type() { return GetParam().type; }
  void SetUp() override {
    at::manual_seed(0);
    if (GetParam().on_device) {
      kernels_.emplace();
    }
  }

 private:
  std::optional<KernelsOnHost> kernels_;
};

#define INSTANTIATE_EACH_FORM(suite)                                                              \
  INSTANTIATE_TEST_SUITE_P(                                                                       \
      Types, suite,                                                                               \
      ::testing::Values(KernelForm{at::kFloat}, KernelForm{at::kBFloat16}, KernelForm{at::kHalf}, \
                        KernelForm{at::kDouble}, KernelForm{at::kFloat, true},                    \
                        KernelForm{at::kBFloat16, true}, KernelForm{at::kHalf, true}),            \
      [](const auto& info) {                                                                      \
        return c10::toString(info.param.type) +                                                   \
               std::string(info.param.on_device ? "OnDevice" : "");                               \
      })

}  // namespace tessera::kernels
