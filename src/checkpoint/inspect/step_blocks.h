#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

#include "step/manifest.h"

namespace tessera::checkpoint {

/// The manifest of a step, or one made from the shards of PyTorch's writer.
Manifest manifest_in(const std::filesystem::path& folder);

/// The bytes of all values of a tensor, in its own type.
std::uint64_t bytes_of_tensor(const ManifestTensor& tensor);

/// The type of a tensor. Throws Error, naming it, for one that libtorch lacks.
c10::ScalarType scalar_type_of(const std::string& name, const ManifestTensor& tensor);

/// Reads the tensors for which `wanted(name)` holds, one file after another, each byte once and
/// compared with its checksum. `visit(name, offset, block)` is given each element in one block, in
/// the file's type, of at most 8 MiB and 2 Mi elements.
void read_blocks(const std::filesystem::path& folder, const Manifest& manifest,
                 const std::function<bool(const std::string&)>& wanted,
                 const std::function<void(const std::string&, std::span<const std::int64_t>,
                                          const at::Tensor&)>& visit);

}  // namespace tessera::checkpoint
