// FLOPs of a model for each token, and of a device: MFU is the quotient.
#include "tessera/observe/flops.h"

#include <algorithm>
#include <cctype>
#include <string_view>
#include <vector>

namespace tessera::observe {
namespace {

/// By the makers' data sheets, dense, in TFLOP/s.
struct Peak {
  std::vector<std::string_view> words;  ///< all are in the name
  double half;                          ///< bf16 and fp16
  double fp32;                          ///< NVIDIA's without TF32; AMD's of its matrix cores
};

/// More particular names first. PCIe and NVL boards are clocked lower than SXM ones; an MI250X
/// shows itself as two devices. Not a constant, as a vector cannot be one.
const std::vector<Peak>& peaks() {
  static const std::vector<Peak> table = {
      {{"A100"}, 312, 19.5},       {{"A6000"}, 154.85, 38.7}, {{"H100", "NVL"}, 835, 60},
      {{"H100", "PCIE"}, 756, 51}, {{"H100"}, 989, 67},       {{"H800"}, 989, 67},
      {{"H200"}, 989, 67},         {{"GH200"}, 989, 67},      {{"H20"}, 148, 44},
      {{"B200"}, 2250, 75},        {{"B300"}, 2250, 75},      {{"GB200"}, 2500, 80},
      {{"GB300"}, 2500, 80},       {{"L40S"}, 362, 91.6},     {{"L4"}, 121, 30.3},
      {{"A10"}, 125, 31.2},        {{"A40"}, 149.7, 37.4},    {{"MI250X"}, 191.5, 47.9},
      {{"MI300X"}, 1307, 163.4},   {{"MI325X"}, 1307, 163.4}, {{"MI355X"}, 2500, 157.3},
  };
  return table;
}

/// Upper-case runs of letters and digits: "A100-SXM4-80GB" is A100, SXM4 and 80GB.
/// Whole words, so that "A10" is not found in "A100".
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

/// 6 for each parameter: 2 forward, 4 backward. Embeddings are looked up, not multiplied.
/// Attention: 12 * layers * hidden * sequence, half of it if causal masks are counted.
ModelFlops model_flops(std::int64_t parameters, std::int64_t embedding_parameters,
                       std::int64_t layers, std::int64_t hidden, std::int64_t sequence) {
  const double dense = 6.0 * static_cast<double>(parameters - embedding_parameters);
  const double attention = 12.0 * static_cast<double>(layers) * static_cast<double>(hidden) *
                           static_cast<double>(sequence);
  return {dense + attention, dense + attention / 2};
}

/// The first row of the table whose words all are in the name.
std::optional<double> peak_flops(const std::string& device_name, c10::ScalarType type) {
  // The last word may be empty, which no row asks for.
  const auto words = words_of(device_name);
  const auto has = [&](std::string_view word) {
    return std::find(words.begin(), words.end(), word) != words.end();
  };
  const auto found = std::find_if(peaks().begin(), peaks().end(), [&](const Peak& peak) {
    return std::all_of(peak.words.begin(), peak.words.end(), has);
  });
  if (found == peaks().end()) {
    return std::nullopt;
  }
  switch (type) {
    case c10::kBFloat16:
    case c10::kHalf:
      return found->half * 1e12;
    case c10::kFloat:
      return found->fp32 * 1e12;
    default:
      return std::nullopt;
  }
}

}  // namespace tessera::observe
