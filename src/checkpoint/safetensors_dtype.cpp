#include "safetensors_dtype.h"

#include <algorithm>

namespace tessera::checkpoint {
namespace {

using c10::ScalarType;

constexpr SafetensorsDtype kDtypes[] = {
    {"BOOL", 8, ScalarType::Bool, 0},
    {"F4", 4, ScalarType::Undefined, 1},
    {"F6_E2M3", 6, ScalarType::Undefined, 2},
    {"F6_E3M2", 6, ScalarType::Undefined, 3},
    {"U8", 8, ScalarType::Byte, 4},
    {"I8", 8, ScalarType::Char, 5},
    {"F8_E5M2", 8, ScalarType::Float8_e5m2, 6},
    {"F8_E4M3", 8, ScalarType::Float8_e4m3fn, 7},
    {"F8_E8M0", 8, ScalarType::Float8_e8m0fnu, 8},
    {"F8_E4M3FNUZ", 8, ScalarType::Float8_e4m3fnuz, 9},
    {"F8_E5M2FNUZ", 8, ScalarType::Float8_e5m2fnuz, 10},
    {"I16", 16, ScalarType::Short, 11},
    {"U16", 16, ScalarType::UInt16, 12},
    {"F16", 16, ScalarType::Half, 13},
    {"BF16", 16, ScalarType::BFloat16, 14},
    {"I32", 32, ScalarType::Int, 15},
    {"U32", 32, ScalarType::UInt32, 16},
    {"F32", 32, ScalarType::Float, 17},
    {"C64", 64, ScalarType::ComplexFloat, 18},
    {"F64", 64, ScalarType::Double, 19},
    {"I64", 64, ScalarType::Long, 20},
    {"U64", 64, ScalarType::UInt64, 21},
};

template <class Predicate>
const SafetensorsDtype* find_where(Predicate predicate) {
  const auto* found = std::find_if(std::begin(kDtypes), std::end(kDtypes), predicate);
  return found == std::end(kDtypes) ? nullptr : found;
}

}  // namespace

const SafetensorsDtype* find_dtype(std::string_view name) {
  return find_where([&](const SafetensorsDtype& dtype) { return dtype.name == name; });
}

const SafetensorsDtype* find_dtype(c10::ScalarType type) {
  if (type == ScalarType::Undefined) return nullptr;
  return find_where([&](const SafetensorsDtype& dtype) { return dtype.scalar_type == type; });
}

}  // namespace tessera::checkpoint
