// A safetensors file, with its header and its data.

#include <ATen/core/Tensor.h>

#include "fuzz_input/input.h"
#include "tessera/checkpoint/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace tessera;
  const auto path = fuzz_input::write_input("model.safetensors", fuzz_input::text_of(bytes, size));
  fuzz_input::parse_or_refuse([&] {
    const checkpoint::SafetensorsFile file(path);
    for (const auto& tensor : file.tensors()) {
      fuzz_input::parse_or_refuse([&] { file.read(tensor.first); });
    }
  });
  return 0;
}
