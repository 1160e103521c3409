// The writing side of a header: where each tensor goes, and the JSON text. The text is written
// without a JSON library, to be equal byte for byte to the reference implementation's.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>

#include "safetensors/format.h"
#include "safetensors/safetensors_header.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

using Item = SafetensorsWriter::Item;

/// By libtorch's type; complex doubles and quantized types have no counterpart.
const SafetensorsDtype& dtype_of(const Item& item) {
  const auto* dtype = find_dtype(item.dtype);
  TESSERA_CHECK(dtype != nullptr, "tensor '", item.name, "' has the type ",
                c10::toString(item.dtype), ", which safetensors lacks: convert it first");
  return *dtype;
}

/// The parser's library escapes as the format requires, and finds text that is no UTF-8.
std::string json_text(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    fail("a name or a metadata value is not valid UTF-8: rename it");
  }
}

/// First in the header, as the reference has it.
std::string metadata_json(const std::map<std::string, std::string>& metadata) {
  std::vector<std::string> pairs;
  for (const auto& [key, value] : metadata) {
    pairs.push_back(json_text(key) + ":" + json_text(value));
  }
  return fmt::format(R"("__metadata__":{{{}}})", fmt::join(pairs, ","));
}

std::string entry_json(const std::string& name, const TensorEntry& entry) {
  return fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", json_text(name),
                     entry.dtype_name, fmt::join(entry.sizes, ","), entry.offset,
                     entry.offset + entry.bytes);
}

}  // namespace

HeaderPlan plan_header(std::vector<Item> items,
                       const std::map<std::string, std::string>& metadata) {
  // Widest types first, so that all data are aligned.
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return std::tuple(-dtype_of(a).order, a.name) < std::tuple(-dtype_of(b).order, b.name);
  });
  HeaderPlan plan;
  std::vector<std::string> parts;
  if (!metadata.empty()) {
    parts.push_back(metadata_json(metadata));
  }
  for (auto& item : items) {
    check_tensor_name(item.name);
    const auto& dtype = dtype_of(item);
    TensorEntry entry{std::string(dtype.name), item.dtype, std::move(item.sizes), plan.data_bytes};
    entry.bytes = tensor_bytes(entry.sizes, dtype);
    plan.data_bytes += entry.bytes;
    parts.push_back(entry_json(item.name, entry));
    TESSERA_CHECK(plan.tensors.emplace(item.name, std::move(entry)).second,
                  "two tensors are named '", item.name, "': rename one of them");
  }
  plan.json = fmt::format("{{{}}}", fmt::join(parts, ","));
  // So the data, too, begin at a multiple of 8: the header's length is stored in 8 bytes.
  plan.json.resize((plan.json.size() + 7) / 8 * 8, ' ');
  TESSERA_CHECK(plan.json.size() <= kMaxHeaderBytes, items.size(),
                " tensors are too many for one safetensors file: write several");
  return plan;
}

}  // namespace tessera::checkpoint
