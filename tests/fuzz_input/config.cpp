// config.json of a model.

#include "examples/llama/model/config.h"

#include "fuzz_input/input.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace tessera;
  fuzz_input::parse_or_refuse([&] {
    const llama::Config config =
        llama::parse_config(fuzz_input::text_of(bytes, size), "config.json");
    llama::count_parameters(config);
    llama::check_tensor_parallel(config, 2);
  });
  return 0;
}
