#include "examples/llama/generate/load_model.h"

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "examples/llama/models.h"
#include "examples/llama/scalar_type.h"
#include "tessera/nn/freeze.h"

namespace llama {

using namespace tessera;

DeviceMesh make_generation_mesh(const GenerateOptions& o, const comm::WorldPtr& world) {
  TESSERA_CHECK(o.tp == world->size(), "--tp ", o.tp, " is ", o.tp, o.tp == 1 ? " rank" : " ranks",
                ", but ", world->size(), world->size() == 1 ? " is" : " are", " running; start ",
                o.tp, " (tessera-run --nproc ", o.tp, ") or change --tp");
  return init_device_mesh(world, {o.tp}, {"tp"});
}

namespace {

/// Generation has no backward. Before the freeze one forward has gradients: in its graph the
/// parallel styles find what the plan does not cover.
void check_plan_and_freeze(Llama& model, const c10::Device& device) {
  const c10::AutoGradMode gradients(true);
  model(at::zeros({1, 1}, at::TensorOptions(c10::kLong).device(device)));
  nn::freeze(model, {"**"});
}

}  // namespace

std::shared_ptr<Llama> load_model(const GenerateOptions& options, const Config& config,
                                  std::int64_t positions, const DeviceMesh& mesh,
                                  bool split_logits) {
  std::shared_ptr<Llama> model;
  {
    const nn::MetaDevice meta;
    model = std::make_shared<Llama>(config, positions);
  }
  model->to(scalar_type(options.dtype));
  apply_tensor_parallel(*model, mesh, {.sequence_parallel = false, .loss_parallel = split_logits});
  nn::to_empty(*model, c10::Device(options.device));
  // The rotary tables are computed; files do not have them.
  nn::init_buffers(*model);
  checkpoint::load_hugging_face(*model, *mesh.world(), options.model);
  nn::check_initialized(*model);
  model->eval();
  check_plan_and_freeze(*model, options.device);
  return model;
}

}  // namespace llama
