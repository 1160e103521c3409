#include "tessera/observe/flops.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <vector>

namespace tessera::observe {
namespace {

struct Peak {
  std::vector<std::string_view> words;  ///< all of which are in the name
  double teraflops;
};

/// More particular names first. PCIe and NVL boards are clocked lower than SXM ones.
const std::vector<Peak>& peaks() {
  static const std::vector<Peak> table = {
      {{"A100"}, 312},    {{"A6000"}, 154.85}, {{"H100", "NVL"}, 835}, {{"H100", "PCIE"}, 756},
      {{"H100"}, 989},    {{"H800"}, 989},     {{"H200"}, 989},        {{"GH200"}, 989},
      {{"H20"}, 148},     {{"B200"}, 2250},    {{"B300"}, 2250},       {{"GB200"}, 2500},
      {{"GB300"}, 2500},  {{"L40S"}, 362},     {{"L4"}, 121},          {{"A10"}, 125},
      {{"A40"}, 149.7},   {{"MI250X"}, 191.5}, {{"MI300X"}, 1300},     {{"MI325X"}, 1300},
      {{"MI355X"}, 2500},
  };
  return table;
}

/// Upper-case runs of letters and digits: "A100-SXM4-80GB" is A100, SXM4 and 80GB.
std::vector<std::string> words_of(const std::string& name) {
  std::vector<std::string> words(1);
  for (const unsigned char c : name) {
    if (std::isalnum(c)) {
      words.back().push_back(static_cast<char>(std::toupper(c)));
    } else if (!words.back().empty()) {
      words.emplace_back();
    }
  }
  return words;
}

}  // namespace

ModelFlops model_flops(std::int64_t parameters, std::int64_t embedding_parameters,
                       std::int64_t layers, std::int64_t hidden, std::int64_t sequence) {
  const double dense = 6.0 * static_cast<double>(parameters - embedding_parameters);
  const double attention = 12.0 * static_cast<double>(layers) * static_cast<double>(hidden) *
                           static_cast<double>(sequence);
  return {dense + attention, dense + attention / 2};
}

std::optional<double> peak_flops(const std::string& device_name) {
  const auto words = words_of(device_name);
  const auto has = [&](std::string_view word) {
    return std::find(words.begin(), words.end(), word) != words.end();
  };
  const auto found = std::find_if(peaks().begin(), peaks().end(), [&](const Peak& peak) {
    return std::all_of(peak.words.begin(), peak.words.end(), has);
  });
  if (found == peaks().end()) return std::nullopt;
  return found->teraflops * 1e12;
}

}  // namespace tessera::observe
