// Shared by the exports of a model and of its adapters.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "parameters/parameters.h"
#include "parameters/stored_tensors.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/comm/world.h"
#include "tessera/nn/parameter.h"

namespace tessera::checkpoint {

/// A parameter and the tensors of files that hold it.
struct SentParameter {
  nn::SlotPtr slot;
  std::vector<StoredTensor> tensors;
};

/// Each under its first name.
std::vector<SentParameter> sent_by_name(const std::vector<NamedParameter>& parameters);

/// The type in which floating-point values are written; none: fp32, which holds every value of the
/// 16-bit types, but fp64 for fp64.
using SentType = std::optional<c10::ScalarType>;

/// The tensors of files. Throws Error for parameters that cannot be saved.
std::vector<SafetensorsWriter::Item> items_of(const std::vector<SentParameter>& parameters,
                                              SentType dtype = {});

/// Writes on rank 0. After a failing write it continues to receive, so that its peers don't wait
/// for it.
class Receiver {
 public:
  using Write = std::function<void(const std::string& name, std::span<const std::int64_t> offset,
                                   const at::Tensor& block)>;
  explicit Receiver(Write write) : write_(std::move(write)) {}

  void write(const std::string& name, std::span<const std::int64_t> offset,
             const at::Tensor& block);
  /// Throws the first failure.
  void check() const;

 private:
  Write write_;
  std::exception_ptr failure_;
};

/// Sends the parameters to rank 0, whose receiver gets them under the names of items_of(), a
/// bounded number of bytes at a time. Collective.
void send_all(const std::vector<SentParameter>& parameters, comm::World& world, Receiver& receiver,
              SentType dtype = {});

}  // namespace tessera::checkpoint
