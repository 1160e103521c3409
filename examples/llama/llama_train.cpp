// Trains a Llama on a 2-D mesh: FSDP x tensor parallel with sequence and loss parallelism.

#include "examples/llama/cli.h"
#include "examples/llama/trainer.h"

namespace {

void train(std::vector<std::string> arguments) {
  const llama::TrainOptions options = llama::parse_train_options(std::move(arguments));
  const tessera::comm::WorldPtr world =
      tessera::comm::world_from_environment({.device = options.device, .backend = options.backend});
  try {
    llama::Trainer(options, world).run();
  } catch (...) {
    world->abort();
    throw;
  }
}

}  // namespace

int main(int argc, char** argv) {
  return llama::run_program("llama_train", argc, argv, train);
}
