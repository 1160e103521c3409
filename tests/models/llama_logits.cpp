// The program llama_logits MODEL OUT TOKEN..., for comparisons with transformers. Writes the logits
// of the tokens to the file OUT, as raw fp32 in the shape (tokens, vocabulary).

#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/models/llama.h"
#include "tessera/nn/initialization.h"

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const std::filesystem::path folder = arguments.at(0);
  std::vector<std::int64_t> tokens;
  for (std::size_t i = 2; i < arguments.size(); ++i) {
    tokens.push_back(std::stoll(arguments[i]));
  }
  try {
    const c10::NoGradGuard no_grad;
    tessera::models::Llama model(tessera::models::read_config(folder / "config.json"),
                                 static_cast<std::int64_t>(tokens.size()));
    tessera::nn::init_buffers(model);
    tessera::checkpoint::load_hugging_face(model, folder);
    const at::Tensor logits = model(at::tensor(tokens, c10::kLong).unsqueeze(0)).contiguous();
    std::ofstream(arguments.at(1), std::ios::binary)
        .write(static_cast<const char*>(logits.const_data_ptr()),
               static_cast<std::streamsize>(logits.nbytes()));
  } catch (const tessera::Error& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
  }
  return 0;
}
