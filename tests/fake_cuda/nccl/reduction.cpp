#include "nccl/reduction.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <mutex>
#include <type_traits>

namespace fake_cuda {
namespace {

/// The factors of scaled sums; their operators are numbered after NCCL's own.
struct Factors {
  std::mutex mutex;
  std::deque<double> factors;
};

Factors& factors() {
  static auto* const once = new Factors;
  return *once;
}

double factor_of(ncclRedOp_t op) {
  const std::lock_guard lock(factors().mutex);
  return factors().factors.at(static_cast<std::size_t>(op - ncclNumOps));
}

/// Calls `use` with a null pointer to the type's C++ type. False for types without arithmetic.
template <class Use>
bool with_type(ncclDataType_t type, Use&& use) {
  switch (type) {
    case ncclInt8:
      use(static_cast<std::int8_t*>(nullptr));
      return true;
    case ncclUint8:
      use(static_cast<std::uint8_t*>(nullptr));
      return true;
    case ncclInt32:
      use(static_cast<std::int32_t*>(nullptr));
      return true;
    case ncclUint32:
      use(static_cast<std::uint32_t*>(nullptr));
      return true;
    case ncclInt64:
      use(static_cast<std::int64_t*>(nullptr));
      return true;
    case ncclUint64:
      use(static_cast<std::uint64_t*>(nullptr));
      return true;
    case ncclFloat16:
      use(static_cast<__half*>(nullptr));
      return true;
    case ncclBfloat16:
      use(static_cast<__nv_bfloat16*>(nullptr));
      return true;
    case ncclFloat32:
      use(static_cast<float*>(nullptr));
      return true;
    case ncclFloat64:
      use(static_cast<double*>(nullptr));
      return true;
    default:
      return false;
  }
}

/// Half types are reduced in fp32 and rounded once.
template <class T>
using Sum = std::conditional_t<std::is_arithmetic_v<T>, T, float>;

template <class T, class Combine>
void combine(T* output, const std::vector<const void*>& inputs, std::size_t count,
             Combine&& combine_two, Sum<T> factor, Sum<T> divisor) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto element = [&](std::size_t rank) {
      return static_cast<Sum<T>>(static_cast<Sum<T>>(static_cast<const T*>(inputs[rank])[i]) *
                                 factor);
    };
    Sum<T> sum = element(0);
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
      sum = static_cast<Sum<T>>(combine_two(sum, element(rank)));
    }
    output[i] = static_cast<T>(static_cast<Sum<T>>(sum / divisor));
  }
}

template <class T>
void reduce_type(T* output, const std::vector<const void*>& inputs, std::size_t count,
                 ncclRedOp_t op) {
  const auto add = [](auto a, auto b) { return a + b; };
  constexpr Sum<T> kOne = 1;
  switch (op) {
    case ncclSum:
      return combine(output, inputs, count, add, kOne, kOne);
    case ncclAvg:
      return combine(output, inputs, count, add, kOne, static_cast<Sum<T>>(inputs.size()));
    case ncclProd:
      return combine(output, inputs, count, [](auto a, auto b) { return a * b; }, kOne, kOne);
    case ncclMax:
      return combine(
          output, inputs, count, [](auto a, auto b) { return std::max(a, b); }, kOne, kOne);
    case ncclMin:
      return combine(
          output, inputs, count, [](auto a, auto b) { return std::min(a, b); }, kOne, kOne);
    default:
      return combine(output, inputs, count, add, static_cast<Sum<T>>(factor_of(op)), kOne);
  }
}

}  // namespace

std::size_t bytes_of(ncclDataType_t type) {
  std::size_t bytes = 1;  // of the types without arithmetic, which are fp8
  with_type(type, [&](auto* null) { bytes = sizeof(*null); });
  return bytes;
}

std::string name_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
      return "int8";
    case ncclUint8:
      return "uint8";
    case ncclInt32:
      return "int32";
    case ncclUint32:
      return "uint32";
    case ncclInt64:
      return "int64";
    case ncclUint64:
      return "uint64";
    case ncclFloat16:
      return "fp16";
    case ncclBfloat16:
      return "bf16";
    case ncclFloat32:
      return "fp32";
    case ncclFloat64:
      return "fp64";
    default:
      return "fp8";
  }
}

bool can_reduce(ncclDataType_t type, ncclRedOp_t op) {
  const std::lock_guard lock(factors().mutex);
  const bool known = op < ncclNumOps + static_cast<int>(factors().factors.size());
  return known && with_type(type, [](auto*) {});
}

void reduce(void* output, const std::vector<const void*>& inputs, std::size_t count,
            ncclDataType_t type, ncclRedOp_t op) {
  with_type(type, [&](auto* null) {
    reduce_type(static_cast<decltype(null)>(output), inputs, count, op);
  });
}

ncclRedOp_t make_scaled_sum(double factor) {
  const std::lock_guard lock(factors().mutex);
  factors().factors.push_back(factor);
  return static_cast<ncclRedOp_t>(ncclNumOps + static_cast<int>(factors().factors.size()) - 1);
}

double number_at(const void* address, ncclDataType_t type) {
  double number = 0;
  with_type(type, [&](auto* null) {
    using T = std::remove_pointer_t<decltype(null)>;
    number = static_cast<double>(static_cast<Sum<T>>(*static_cast<const T*>(address)));
  });
  return number;
}

}  // namespace fake_cuda
