// From a model's folder to a model that computes on one rank or on several.

#pragma once

#include <cstdint>
#include <memory>

#include "examples/llama/generate/generate_options.h"
#include "examples/llama/models.h"
#include "tessera/comm/world.h"
#include "tessera/mesh/device_mesh.h"

namespace llama {

/// The mesh ("tp") of a run. Throws tessera::Error if --tp is not the number of ranks that the
/// launcher has started.
tessera::DeviceMesh make_generation_mesh(const GenerateOptions& options,
                                         const tessera::comm::WorldPtr& world);

/// The weights of options.model in the type options.dtype, each rank's part of them alone: no rank
/// ever holds more. `positions`: that the rotary tables cover. Logits are whole on every rank, or
/// with `split_logits` split over the vocabulary, for the loss. Collective.
std::shared_ptr<Llama> load_model(const GenerateOptions& options, const Config& config,
                                  std::int64_t positions, const tessera::DeviceMesh& mesh,
                                  bool split_logits);

}  // namespace llama
