#include "nccl/buffers.h"

#include <cstdint>
#include <string>

#include "nccl/reduction.h"
#include "record/record.h"
#include "runtime/memory.h"

namespace fake_cuda {
namespace {

/// What NCCL moves at a time, where addresses allow it.
constexpr std::size_t kUnit = 16;

struct Buffer {
  const void* data;
  std::size_t bytes;

  std::uintptr_t begin() const { return reinterpret_cast<std::uintptr_t>(data); }
  std::uintptr_t end() const { return begin() + bytes; }
  bool aligned_to(std::size_t unit) const { return begin() % unit == 0; }
};

Buffer input_of(const Operation& operation) {
  return {operation.send, operation.input_bytes()};
}

Buffer output_of(const Operation& operation) {
  const std::size_t bytes = operation.count * bytes_of(operation.type);
  const auto ranks = static_cast<std::size_t>(operation.communicator->ranks());
  const bool whole = operation.collective == Collective::kAllGather ||
                     operation.collective == Collective::kAllToAll;
  return {operation.receive, whole ? bytes * ranks : bytes};
}

bool overlap(const Buffer& a, const Buffer& b) {
  return a.begin() < b.end() && b.begin() < a.end();
}

/// Where NCCL documents the operation as in place.
bool in_place(const Operation& operation, const Buffer& input, const Buffer& output) {
  const auto rank = static_cast<std::size_t>(operation.communicator->rank());
  switch (operation.collective) {
    case Collective::kAllGather:
      return input.begin() == output.begin() + rank * input.bytes;
    case Collective::kReduceScatter:
      return output.begin() == input.begin() + rank * output.bytes;
    case Collective::kAllToAll:
      return false;
    default:
      return input.begin() == output.begin();
  }
}

/// Empty for a buffer that NCCL can use. Ranks that do not take part have none.
std::string fault_of(const Buffer& buffer, std::size_t element) {
  if (buffer.data == nullptr || buffer.bytes == 0) {
    return "";
  }
  if (kind_of(buffer.data) == MemoryKind::kPageable) {
    return "a buffer is pageable memory of the host";
  }
  if (buffer.bytes > bytes_from(buffer.data)) {
    return "a buffer reaches past the end of its memory";
  }
  return buffer.aligned_to(element) ? "" : "a buffer is not aligned to its elements";
}

}  // namespace

bool check_buffers(const Operation& operation) {
  const Buffer input = input_of(operation);
  const Buffer output = output_of(operation);
  const std::size_t element = bytes_of(operation.type);
  std::string fault = fault_of(input, element);
  fault = fault.empty() ? fault_of(output, element) : fault;
  const bool both = input.data != nullptr && output.data != nullptr;
  if (fault.empty() && both && overlap(input, output) && !in_place(operation, input, output)) {
    fault = "input and output overlap, but not as an operation in place";
  }
  if (!fault.empty()) {
    count_violation(name_of(operation.collective) + ": " + fault);
  }
  return fault.empty();
}

bool is_aligned(const Operation& operation) {
  return input_of(operation).aligned_to(kUnit) && output_of(operation).aligned_to(kUnit);
}

std::size_t bytes_of_unaligned_parts(const Operation& operation) {
  const bool in_parts = operation.collective == Collective::kAllGather ||
                        operation.collective == Collective::kReduceScatter ||
                        operation.collective == Collective::kAllToAll;
  const std::size_t part = operation.count * bytes_of(operation.type);
  return in_parts && operation.communicator->ranks() > 1 && part % kUnit != 0 ? part : 0;
}

}  // namespace fake_cuda
