// The reading side of a header. Every field is checked before it is used, against the others and
// against the size of the file; nothing is allocated by a number that the file claims. Messages
// begin with "its": the callers put the tensor's and the file's name in front.

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "safetensors/format.h"
#include "safetensors/natural_numbers.h"
#include "safetensors/safetensors_header.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

using nlohmann::json;

/// Top-level object, a tensor's object, its lists.
constexpr JsonLimits kHeaderLimits{.depth = 3, .keys = 1'000'000, .values = 4'000'000};

/// A type that the format has and libtorch lacks is fine here: only reading such a tensor fails.
const SafetensorsDtype& parse_dtype(const json& value) {
  TESSERA_CHECK(value.is_string(), "its dtype is not a string");
  const auto* dtype = find_dtype(value.get_ref<const std::string&>());
  TESSERA_CHECK(dtype != nullptr, "its dtype ", value.dump(), " is unknown");
  return *dtype;
}

const json& field(const json& object, const char* name) {
  const auto found = object.find(name);
  TESSERA_CHECK(found != object.end(), "it has no ", name);
  return *found;
}

TensorEntry parse_entry(const json& value, std::uint64_t data_bytes) {
  TESSERA_CHECK(value.is_object(), "its entry is not an object");
  const auto& dtype = parse_dtype(field(value, "dtype"));
  TensorEntry entry{std::string(dtype.name), dtype.scalar_type,
                    natural_numbers(field(value, "shape"), "its shape")};
  const auto& offsets = field(value, "data_offsets");
  // The three fields have been found, so a fourth is unknown.
  TESSERA_CHECK(value.size() == 3, "its entry has fields besides dtype, shape and data_offsets");
  TESSERA_CHECK(offsets.is_array() && offsets.size() == 2, "its data_offsets are not two numbers");
  const auto begin = natural_number(offsets[0], "its data_offsets");
  const auto end = natural_number(offsets[1], "its data_offsets");
  TESSERA_CHECK(begin <= end, "its data end at ", end, ", before they begin at ", begin);
  TESSERA_CHECK(std::cmp_less_equal(end, data_bytes), "its data end at ", end,
                ", but the file has only ", data_bytes, " bytes of data: it is truncated");
  entry.offset = static_cast<std::uint64_t>(begin);
  entry.bytes = tensor_bytes(entry.sizes, dtype);
  TESSERA_CHECK(std::cmp_equal(end - begin, entry.bytes), "its data have ", end - begin,
                " bytes, but its shape and dtype need ", entry.bytes);
  return entry;
}

/// Null is none, as for Hugging Face's reader.
std::map<std::string, std::string> parse_metadata(const json& value) {
  TESSERA_CHECK(value.is_object() || value.is_null(), "__metadata__ is not an object");
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    TESSERA_CHECK(text.is_string(), "__metadata__ holds ", text.type_name(), " under ",
                  json(key).dump(), ", not a string");
    metadata.emplace(key, text.get<std::string>());
  }
  return metadata;
}

/// The data are used from the first to the last byte, and by one tensor each. Holes could hide
/// data, and overlaps would be two names for it. Sorted by offset and then by size, so that empty
/// tensors come before the one that begins at the same place.
void check_coverage(const std::map<std::string, TensorEntry>& tensors, std::uint64_t data_bytes) {
  std::vector<std::pair<const std::string, TensorEntry> const*> order;
  for (const auto& item : tensors) {
    order.push_back(&item);
  }
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.offset, a->second.bytes) <
           std::pair(b->second.offset, b->second.bytes);
  });
  std::uint64_t end = 0;
  for (const auto* item : order) {
    TESSERA_CHECK(item->second.offset == end, "tensor '", item->first, "': its data begin at ",
                  item->second.offset, ", but those before it end at ", end);
    end += item->second.bytes;
  }
  TESSERA_CHECK(end == data_bytes, "the tensors' data end at ", end, ", but the file has ",
                data_bytes, " bytes of data");
}

}  // namespace

SafetensorsHeader parse_header(std::string_view text, std::uint64_t data_bytes) {
  const json root = detail::parse_strict_json(text, kHeaderLimits);
  SafetensorsHeader header;
  for (const auto& [name, value] : root.items()) {
    // The only name that is not a tensor's.
    if (name == "__metadata__") {
      header.metadata = parse_metadata(value);
      continue;
    }
    check_tensor_name(name);
    try {
      header.tensors.emplace(name, parse_entry(value, data_bytes));
    } catch (const Error& error) {
      fail("tensor '", name, "': ", error.what());
    }
  }
  check_coverage(header.tensors, data_bytes);
  return header;
}

}  // namespace tessera::checkpoint
