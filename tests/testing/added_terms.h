#pragma once

#include <ATen/record_function.h>

#include <atomic>
#include <string_view>

namespace tessera::testing {

/// While an AddedTerms exists, counts in-place additions to plain 2-D tensors, on this thread and
/// in backward passes that this thread starts. All AddedTerms objects share the counts.
class AddedTerms {
 public:
  AddedTerms()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(nullptr, &count).needsOutputs(true))) {}
  ~AddedTerms() { at::removeCallback(handle_); }
  AddedTerms(const AddedTerms&) = delete;
  AddedTerms& operator=(const AddedTerms&) = delete;

  static void reset() { products() = additions() = 0; }
  /// Number of in-place additions of matrix products (addmm_).
  static std::atomic<int>& products() {
    static std::atomic<int> number = 0;
    return number;
  }
  /// Number of in-place additions of tensors (add_).
  static std::atomic<int>& additions() {
    static std::atomic<int> number = 0;
    return number;
  }

 private:
  static void count(const at::RecordFunction& call, at::ObserverContext*) {
    const std::string_view name = call.name();
    if (name == "aten::addmm_") {
      ++products();
    } else if (name == "aten::add_" && call.outputs()[0].toTensor().dim() == 2) {
      ++additions();
    }
  }

  at::CallbackHandle handle_;
};

}  // namespace tessera::testing
