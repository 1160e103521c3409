// DCP_SHARDING_INFO, the metadata by which PyTorch's shards say where their blocks begin.

#include <cstdint>
#include <nlohmann/json.hpp>

#include "checkpoint/step_files.h"
#include "fuzz_input/input.h"
#include "fuzz_input/samples.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  using namespace tessera;
  fuzz_input::write_input("shard-00001-model-00001-of-00001.safetensors",
                          fuzz_input::shard_with(fuzz_input::text_of(bytes, size)));
  fuzz_input::parse_or_refuse([] { checkpoint::manifest_of_shards(fuzz_input::own_folder()); });
  return 0;
}
