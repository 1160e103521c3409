// config.json of a model.

#include "tessera/models/llama_config.h"

#include "fuzz_input/input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace tessera;
  fuzz_input::parse_or_refuse([&] {
    const models::LlamaConfig config =
        models::parse_config(fuzz_input::text_of(bytes, size), "config.json");
    models::count_parameters(config);
    models::check_tensor_parallel(config, 2);
  });
  return 0;
}
