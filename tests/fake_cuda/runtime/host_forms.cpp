#include "runtime/host_forms.h"

#include <cxxabi.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "random_elements.h"

namespace fake_cuda {
namespace {

using namespace tessera::kernels;

/// fill_kernel of src/kernels/random.cu, by one thread.
template <class T, class Draw>
std::function<void()> fill(void** arguments) {
  return [data = *static_cast<T**>(arguments[0]), box = *static_cast<BoxView*>(arguments[1]),
          draw = *static_cast<Draw*>(arguments[2]), key = *static_cast<PhiloxKey*>(arguments[3])] {
    fill_elements(data, box, draw, key, /*first=*/0, /*step=*/1);
  };
}

struct Named {
  std::string_view kernel;
  HostForm form;
};

constexpr std::array<Named, 3> kForms = {
    {{"::fill_kernel<float, tessera::kernels::Uniform>(", &fill<float, Uniform>},
     {"::fill_kernel<float, tessera::kernels::Normal>(", &fill<float, Normal>},
     {"::fill_kernel<float, tessera::kernels::TruncatedNormal>(", &fill<float, TruncatedNormal>}}};

std::string demangled(const std::string& name) {
  const std::unique_ptr<char, decltype(&std::free)> text(
      abi::__cxa_demangle(name.c_str(), nullptr, nullptr, nullptr), &std::free);
  return text == nullptr ? name : text.get();
}

}  // namespace

HostForm host_form_of(const std::string& kernel) {
  // libtorch registers thousands of kernels, and demangling takes time.
  if (kernel.find("7tessera") == std::string::npos) {
    return nullptr;
  }
  const std::string name = demangled(kernel);
  const auto* const found = std::ranges::find_if(
      kForms, [&](const Named& named) { return name.find(named.kernel) != std::string::npos; });
  return found == kForms.end() ? nullptr : found->form;
}

}  // namespace fake_cuda
