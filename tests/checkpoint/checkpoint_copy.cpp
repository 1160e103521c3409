// The program checkpoint_copy DP TP FROM TO, for tests that compare with PyTorch. Loads a small
// model and its AdamW state from FROM on a mesh DP x TP, and saves both to TO. FROM and TO are
// files of whole tensors or folders of a training step; FROM can also be a Hugging Face model.

#include <cstdlib>
#include <iostream>

#include "checkpoint/known_model.h"
#include "tessera/checkpoint/hugging_face.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "optimizer.state.";

class CopiedState {
 public:
  CopiedState(const comm::WorldPtr& world, std::int64_t dp, std::int64_t tp)
      : world_(world), mesh_(init_device_mesh(world, {dp, tp}, {"dp", "tp"})) {
    Distribute(net_, mesh_, Zeros());
    for (const auto& [name, slot] : net_.named_slots()) {
      for (const char* kind : {".exp_avg", ".exp_avg_sq"}) {
        optimizer_.emplace_back(name + kind, at::zeros_like(slot->persistent()).detach());
      }
      optimizer_.emplace_back(name + ".step", at::zeros({}));
    }
  }

  void read(const fs::path& from) {
    if (fs::is_regular_file(from)) {
      fill(ReadModel(from));
    } else if (fs::exists(from / "model.safetensors.index.json")) {
      load_hugging_face(net_, *world_, from);
    } else {
      load(*world_, from, {net_, optimizer_});
    }
  }

  void write(const fs::path& to) {
    if (to.extension() != ".safetensors") {
      return save(*world_, to, 1, {net_, optimizer_});
    }
    Tensors whole;
    for (const auto& [name, slot] : net_.named_slots()) {
      whole[name] = full_tensor(slot->persistent());
    }
    for (const auto& [name, tensor] : optimizer_) {
      whole[kPrefix + name] = full_tensor(tensor);
    }
    if (world_->rank() == 0) {
      WriteModel(to, whole);
    }
  }

 private:
  void fill(const Tensors& whole) {
    Distribute(net_, mesh_, whole);
    for (auto& [name, tensor] : optimizer_) {
      const at::Tensor& value = whole.at(kPrefix + name);
      if (is_distributed(tensor)) {
        const auto placements = DistributedTensor(tensor).placements();
        tensor = distribute_tensor(value, mesh_, placements);
      } else {
        tensor = value;
      }
    }
  }

  comm::WorldPtr world_;
  DeviceMesh mesh_;
  Net net_;
  std::vector<std::pair<std::string, at::Tensor>> optimizer_;
};

}  // namespace
}  // namespace tessera::checkpoint

int main(int argc, char** argv) {
  using namespace tessera;
  try {
    TESSERA_CHECK(argc == 5, "four arguments are needed: DP TP FROM TO");
    const comm::WorldScope scope(comm::world_from_environment());
    checkpoint::CopiedState state(scope.world(), std::atoi(argv[1]), std::atoi(argv[2]));
    state.read(argv[3]);
    state.write(argv[4]);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
