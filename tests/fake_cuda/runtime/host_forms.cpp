#include "runtime/host_forms.h"

#include <cxxabi.h>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>

#include "random_elements.h"
#include "runtime/memory.h"

namespace fake_cuda {
namespace {

using namespace tessera::kernels;

/// fill_kernel of src/kernels/random.cu, by one thread.
template <class T, class Draw>
std::function<void()> fill(void** arguments) {
  return [data = *static_cast<T**>(arguments[0]), box = *static_cast<BoxView*>(arguments[1]),
          draw = *static_cast<Draw*>(arguments[2]), key = *static_cast<PhiloxKey*>(arguments[3])] {
    fill_elements(view_of(data), box, draw, key, /*first=*/0, /*step=*/1);
  };
}

/// dropout_kernel of the same file.
template <class T, class Compute>
std::function<void()> drop(void** arguments) {
  return
      [out = *static_cast<T**>(arguments[0]), x = *static_cast<const T**>(arguments[1]),
       box = *static_cast<BoxView*>(arguments[2]), p = *static_cast<double*>(arguments[3]),
       scale = *static_cast<Compute*>(arguments[4]), key = *static_cast<PhiloxKey*>(arguments[5])] {
        drop_elements(view_of(out), view_of(x), box, p, scale, key, /*first=*/0, /*step=*/1);
      };
}

using Forms = std::map<std::string, HostForm>;

/// Those of one type of elements, by the names of the kernels that they stand for.
template <class T, class Compute>
Forms forms_of(const std::string& type, const std::string& compute) {
  const auto fill_kernel = [&](const std::string& draw) {
    return "::fill_kernel<" + type + ", tessera::kernels::" + draw + ">(";
  };
  return {{fill_kernel("Uniform"), &fill<T, Uniform>},
          {fill_kernel("Normal"), &fill<T, Normal>},
          {fill_kernel("TruncatedNormal"), &fill<T, TruncatedNormal>},
          {fill_kernel("Bernoulli"), &fill<T, Bernoulli>},
          {"::dropout_kernel<" + type + ", " + compute + ">(", &drop<T, Compute>}};
}

Forms all_forms() {
  Forms forms = forms_of<float, float>("float", "float");
  forms.merge(forms_of<double, double>("double", "double"));
  forms.merge(forms_of<c10::Half, float>("c10::Half", "float"));
  forms.merge(forms_of<c10::BFloat16, float>("c10::BFloat16", "float"));
  return forms;
}

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
  static const Forms forms = all_forms();
  const auto found = std::ranges::find_if(
      forms, [&](const auto& form) { return name.find(form.first) != std::string::npos; });
  return found == forms.end() ? nullptr : found->second;
}

}  // namespace fake_cuda
