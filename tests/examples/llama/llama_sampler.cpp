// llama_sampler LOGITS SEEN OUT SIZE TEMPERATURE TOP_K TOP_P MIN_P PENALTY: writes the
// probabilities with which the next tokens of texts are drawn to OUT, raw fp64, (texts, SIZE), from
// LOGITS, raw fp32, and the tokens that they have SEEN, a byte for each logit. For comparisons with
// transformers.

#include <ATen/ops/from_file.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "examples/llama/generate/generate.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const auto number = [&](std::size_t i) { return std::stod(arguments.at(i)); };
  const auto read = [&](std::size_t i, c10::ScalarType type) {
    const auto bytes = static_cast<std::int64_t>(std::filesystem::file_size(arguments.at(i)));
    return at::from_file(arguments.at(i), /*shared=*/false,
                         bytes / static_cast<std::int64_t>(c10::elementSize(type)), at::dtype(type))
        .view({-1, std::stoll(arguments.at(3))});
  };
  const llama::SamplingOptions options{.temperature = number(4),
                                       .top_k = std::stoll(arguments.at(5)),
                                       .top_p = number(6),
                                       .min_p = number(7),
                                       .repetition_penalty = number(8)};
  const at::Tensor probabilities =
      llama::token_probabilities(read(0, c10::kFloat), read(1, c10::kBool), options).contiguous();
  std::ofstream(arguments.at(2), std::ios::binary)
      .write(static_cast<const char*>(probabilities.const_data_ptr()),
             static_cast<std::streamsize>(probabilities.nbytes()));
  return 0;
}
