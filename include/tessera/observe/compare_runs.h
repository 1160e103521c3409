#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/export.h"
#include "tessera/mesh/device_mesh.h"

TESSERA_API_BEGIN
namespace tessera::nn {
class ModuleBase;
}

namespace tessera::observe {

/// How compare_runs() records and compares.
struct CompareOptions {
  /// Where rank 0 of the mesh keeps the recording. Empty: compare_runs() does nothing.
  std::filesystem::path folder{};
  /// How many forwards of the model with gradient are recorded, or compared.
  std::int64_t steps = 1;
  /// The largest difference that is allowed, as a share of the largest value of the tensor.
  /// Default: the square root of the type's epsilon (3.5e-4 for fp32, 0.09 for bf16).
  std::optional<double> tolerance{};
  /// Gets the findings, one line each, on rank 0 of the mesh. Empty: they go to standard error.
  std::function<void(const std::string& line)> report{};
};

/// The options in TESSERA_COMPARE (the folder), TESSERA_COMPARE_STEPS and
/// TESSERA_COMPARE_TOLERANCE. Throws Error for a value that is not a positive number.
CompareOptions compare_options_from_environment();

/// Finds the first number that differs between two runs of a program on different meshes. The first
/// run, with an empty folder, records: the model's input, its parameters, the output of each module
/// by FQN, the gradients of those outputs and of the parameters, all as whole tensors, in
/// safetensors files. A run on another mesh then compares its own with them and names the first
/// that differs: in the order of forward, then of backward. docs/numbers.md has an example.
///
/// `mesh`: all ranks of the run. `batch_dims`: those of its dimensions along which ranks have
/// different samples, split along dimension 0; losses are taken to be means over a rank's samples.
/// A plain tensor that other dimensions hold in parts is compared as the one of its possible
/// concatenations that fits.
///
/// Call it once, when the model is ready for its first forward: hooks that are added later are not
/// seen. Collective over `mesh`, and so are the forwards and backwards that are recorded. Takes the
/// time of gathering every tensor on every rank; the numbers are not changed. Throws Error for an
/// unknown dimension, and for a folder that holds something else than a recording.
void compare_runs(nn::ModuleBase& model, const DeviceMesh& mesh,
                  const std::vector<std::string>& batch_dims,
                  const CompareOptions& options = compare_options_from_environment());

}  // namespace tessera::observe
TESSERA_API_END
