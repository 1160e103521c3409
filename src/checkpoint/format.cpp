#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "format.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::checkpoint {
namespace {

using SizesRef = std::span<const std::int64_t>;

/// The strides, in elements, of a row-major tensor.
std::vector<std::int64_t> row_major_strides(SizesRef sizes) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t dim = sizes.size(); dim-- > 1;) {
    strides[dim - 1] = strides[dim] * sizes[dim];
  }
  return strides;
}

/// The number of leading dimensions to iterate over when a block is split into contiguous runs. In
/// all later dimensions the block is complete, except that the block may cover only a range of the
/// first later dimension.
std::size_t outer_dims(SizesRef sizes, SizesRef block) {
  std::size_t dim = sizes.size();
  while (dim > 0 && block[dim - 1] == sizes[dim - 1]) {
    --dim;
  }
  return dim == 0 ? 0 : dim - 1;
}

/// Advances `index` to the next position in `block`, in row-major order. Returns false if `index`
/// was the last position.
bool advance(std::vector<std::int64_t>& index, SizesRef block) {
  for (std::size_t dim = index.size(); dim-- > 0;) {
    if (++index[dim] < block[dim]) {
      return true;
    }
    index[dim] = 0;
  }
  return false;
}

}  // namespace

std::int64_t product(SizesRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

void check_block(SizesRef sizes, SizesRef offset, SizesRef block) {
  TESSERA_CHECK(offset.size() == sizes.size() && block.size() == sizes.size(), "a block of ",
                block.size(), " dimensions does not fit a tensor of ", sizes.size());
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    TESSERA_CHECK(offset[dim] >= 0 && block[dim] >= 0 && block[dim] <= sizes[dim] &&
                      offset[dim] <= sizes[dim] - block[dim],
                  "positions [", offset[dim], ", ", offset[dim], " + ", block[dim],
                  ") are outside of dimension ", dim, ", which has ", sizes[dim]);
  }
}

/// Visits contiguous runs. A run covers the trailing dimensions that the block spans completely,
/// and the last dimension before these dimensions. The index iterates over the remaining leading
/// dimensions.
void for_each_run(SizesRef sizes, SizesRef offset, SizesRef block,
                  const std::function<void(std::int64_t, std::int64_t)>& visit) {
  // Returns early for an empty block, because the loop below visits at least one run.
  if (std::find(block.begin(), block.end(), 0) != block.end()) {
    return;
  }
  const auto strides = row_major_strides(sizes);
  const auto outer = outer_dims(sizes, block);
  const auto count = product(block.subspan(outer));
  const auto first =
      std::inner_product(offset.begin(), offset.end(), strides.begin(), std::int64_t{0});
  std::vector<std::int64_t> index(outer, 0);
  // For a scalar, the index is empty and advance() returns false, so the loop visits one run.
  do {
    visit(std::inner_product(index.begin(), index.end(), strides.begin(), first), count);
  } while (advance(index, block.first(outer)));
}

/// The pieces have size 1 in all dimensions before the first dimension whose rows fit into a piece.
void for_each_piece(SizesRef sizes, std::int64_t most_elements,
                    const std::function<void(SizesRef, SizesRef)>& visit) {
  if (product(sizes) == 0) {
    return;
  }
  if (sizes.empty()) {
    return visit({}, {});
  }
  std::size_t cut = 0;
  std::vector<std::int64_t> offset(sizes.size(), 0);
  std::vector<std::int64_t> piece(sizes.begin(), sizes.end());
  while (cut + 1 < sizes.size() && product(sizes.subspan(cut + 1)) > most_elements) {
    piece[cut++] = 1;
  }
  const std::int64_t step =
      std::max<std::int64_t>(1, most_elements / product(sizes.subspan(cut + 1)));
  std::vector<std::int64_t> outer(cut, 0);
  do {
    std::ranges::copy(outer, offset.begin());
    for (offset[cut] = 0; offset[cut] < sizes[cut]; offset[cut] += step) {
      piece[cut] = std::min(step, sizes[cut] - offset[cut]);
      visit(offset, piece);
    }
  } while (advance(outer, sizes.first(cut)));
}

std::vector<std::int64_t> moved(SizesRef from, SizesRef by) {
  std::vector<std::int64_t> place(from.begin(), from.end());
  std::ranges::transform(place, by, place.begin(), std::plus<>());
  return place;
}

/// The result usually has one box. Some layouts split the part of a rank into several boxes: see
/// owned_boxes().
std::vector<Box> owned_blocks(const at::Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const std::vector<std::int64_t> zeros(sizes.size(), 0);
  if (!tessera::is_distributed(tensor)) {
    // A plain tensor is complete on every rank.
    return {Box{zeros, zeros, sizes.vec()}};
  }
  const auto& spec = sharding_spec(tensor);
  if (!spec.mesh.contains_this_rank()) {
    return {};
  }
  return owned_boxes(*spec.layout, std::span(sizes.data(), sizes.size()), spec.mesh.coordinate());
}

at::Tensor block_at(const at::Tensor& tensor, SizesRef offset, SizesRef sizes) {
  at::Tensor block = tensor;
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    block = block.narrow(static_cast<std::int64_t>(dim), offset[dim], sizes[dim]);
  }
  return block;
}

/// The view begins at box.local_offset; box.global_offset is the position in the file.
at::Tensor local_block(const at::Tensor& local, const Box& box) {
  return block_at(local, box.local_offset, box.sizes);
}

namespace {

/// The number of bytes that are read and summed at once: 256 KiB, an eighth of a 2 MiB L2 cache.
/// Summing whole 1 MiB granules took 1.9 times as long.
constexpr std::size_t kCachedBytes = std::size_t{256} << 10;

}  // namespace

std::uint32_t read_and_sum(const files::InputFile& file, std::uint64_t offset,
                           std::span<std::byte> out) {
  std::uint32_t sum = 0;
  while (!out.empty()) {
    const auto part = out.first(std::min(kCachedBytes, out.size()));
    file.read_at(offset, part);
    sum = detail::crc32c(part, sum);
    offset += part.size();
    out = out.subspan(part.size());
  }
  return sum;
}

void GranuleSums::add(std::uint64_t offset, std::span<const std::byte> bytes) {
  TESSERA_CHECK(offset == bytes_, "bytes at ", offset, " of a file were written after ", bytes_,
                ": write it from its start to its end");
  while (!bytes.empty()) {
    if (bytes_ % kGranuleBytes == 0) {
      sums_.push_back(0);
    }
    const auto room = kGranuleBytes - bytes_ % kGranuleBytes;
    const auto part = bytes.first(std::min<std::uint64_t>(room, bytes.size()));
    sums_.back() = detail::crc32c(part, sums_.back());
    bytes_ += part.size();
    bytes = bytes.subspan(part.size());
  }
}

CheckedFile::CheckedFile(files::InputFile file, std::vector<std::uint32_t> sums)
    : file_(std::move(file)), sums_(std::move(sums)) {
  TESSERA_CHECK(sums_.empty() || sums_.size() == granules_of(file_.size()), "'", path().string(),
                "' has ", file_.size(), " bytes, but checksums of ", sums_.size(),
                " MiB: copy it again");
}

std::uint64_t CheckedFile::bytes_of_granule(std::uint64_t index) const {
  return std::min(kGranuleBytes, size() - index * kGranuleBytes);
}

void CheckedFile::read_granule(std::uint64_t index, std::span<std::byte> out) const {
  const std::uint64_t begin = index * kGranuleBytes;
  const std::uint32_t found = read_and_sum(file_, begin, out);
  TESSERA_CHECK(found == sums_[index], "bytes ", begin, " to ", begin + out.size() - 1, " of '",
                path().string(), "' are not those that were written (CRC-32C ",
                fmt::format("{:08x}, {:08x}", found, sums_[index]),
                " expected): copy the file again, or load another step");
}

CheckedFile::CachedGranule& CheckedFile::cache_of_this_thread() const {
  const std::lock_guard lock(mutex_);
  return cache_[std::this_thread::get_id()];
}

void CheckedFile::read_part(std::uint64_t index, std::uint64_t within,
                            std::span<std::byte> out) const {
  CachedGranule& cached = cache_of_this_thread();
  if (cached.index != index) {
    // The cached granule is invalid until its checksum has been verified.
    cached.index = UINT64_MAX;
    cached.bytes.resize(bytes_of_granule(index));
    read_granule(index, cached.bytes);
    cached.index = index;
  }
  std::memcpy(out.data(), cached.bytes.data() + within, out.size());
}

void CheckedFile::read_at(std::uint64_t offset, std::span<std::byte> out) const {
  // For a range beyond the end of the file, InputFile throws the error.
  if (offset + out.size() > size()) {
    return file_.read_at(offset, out);
  }
  while (!out.empty()) {
    const std::uint64_t index = offset / kGranuleBytes;
    const std::uint64_t within = offset % kGranuleBytes;
    const auto part = out.first(std::min(bytes_of_granule(index) - within, out.size()));
    if (sums_.empty()) {
      file_.read_at(offset, part);
    } else if (part.size() == bytes_of_granule(index)) {
      read_granule(index, part);
    } else {
      read_part(index, within, part);
    }
    offset += part.size();
    out = out.subspan(part.size());
  }
}

namespace {

using c10::ScalarType;

/// The types of the format, sorted as in the enum of the reference implementation, because the
/// order of the tensors in a file depends on this order.
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

/// Whether UTF-8 text begins with a control character (U+0000 to U+001F, U+007F to U+009F) or a
/// bidirectional override (U+202A to U+202E, U+2066 to U+2069), which can make a terminal display a
/// different name.
bool begins_with_control(std::string_view text) {
  const auto within = [text](std::size_t i, unsigned char first, unsigned char last) {
    const auto byte = static_cast<unsigned char>(text[i]);
    return first <= byte && byte <= last;
  };
  if (text.starts_with('\xc2') && text.size() > 1) {
    return within(1, 0x80, 0x9f);
  }
  if (text.starts_with("\xe2\x80") && text.size() > 2) {
    return within(2, 0xaa, 0xae);
  }
  if (text.starts_with("\xe2\x81") && text.size() > 2) {
    return within(2, 0xa6, 0xa9);
  }
  return within(0, 0, 0x1f) || within(0, 0x7f, 0x7f);
}

}  // namespace

const SafetensorsDtype* find_dtype(std::string_view name) {
  return find_where([&](const SafetensorsDtype& dtype) { return dtype.name == name; });
}

const SafetensorsDtype* find_dtype(c10::ScalarType type) {
  // The type Undefined is excluded, because Undefined in a row of the table means that libtorch
  // lacks the type.
  if (type == ScalarType::Undefined) {
    return nullptr;
  }
  return find_where([&](const SafetensorsDtype& dtype) { return dtype.scalar_type == type; });
}

std::uint64_t tensor_bytes(std::span<const std::int64_t> sizes, const SafetensorsDtype& dtype) {
  // Zeros count as ones, so that a product that wraps around to 0 does not pass as an empty tensor.
  std::int64_t positions = 1;
  for (const auto size : sizes) {
    TESSERA_CHECK(!__builtin_mul_overflow(positions, std::max<std::int64_t>(size, 1), &positions),
                  "the number of its elements overflows");
  }
  const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  std::uint64_t bits = 0;
  TESSERA_CHECK(!__builtin_mul_overflow(empty ? 0 : positions, dtype.bits, &bits),
                "the number of its bytes overflows");
  // Tensors of 4-bit and 6-bit types can end inside a byte, which the format forbids.
  TESSERA_CHECK(bits % 8 == 0, "its ", bits, " bits are not a whole number of bytes");
  return bits / 8;
}

bool has_control_character(std::string_view text) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (begins_with_control(text.substr(i))) {
      return true;
    }
  }
  return false;
}

/// Throws Error for an unsafe tensor name. The format allows any string, but programs use names as
/// file names and print them to terminals.
void check_tensor_name(std::string_view name) {
  constexpr std::size_t kMaxNameBytes = 4096;
  TESSERA_CHECK(!name.empty(), "a tensor's name is empty");
  TESSERA_CHECK(name.size() <= kMaxNameBytes, "a tensor's name has ", name.size(),
                " bytes, more than ", kMaxNameBytes);
  TESSERA_CHECK(!has_control_character(name), "a tensor's name has a control character");
  TESSERA_CHECK(name != "__metadata__",
                "the tensor name '__metadata__' is that of a file's own entry: rename the tensor");
  TESSERA_CHECK(
      name.find_first_of("/\\") == std::string::npos && name.find("..") == std::string::npos,
      "the tensor name '", name, "' looks like a path");
}

namespace {

/// The maximum number of dimensions that libtorch's operators support (at::dim_bitset_size).
constexpr std::size_t kMaxDims = 64;

}  // namespace

/// The value of a natural number in JSON. The JSON parser classifies a number as unsigned only if
/// it is a natural number that fits in 64 bits.
std::int64_t natural_number(const nlohmann::json& value, const char* what) {
  TESSERA_CHECK(value.is_number_unsigned(), what, " holds ",
                value.is_number() ? value.dump() : value.type_name(),
                ", which is not a natural number");
  const auto number = value.get<std::uint64_t>();
  TESSERA_CHECK(std::in_range<std::int64_t>(number), what, " holds ", number,
                ", which is too large");
  return static_cast<std::int64_t>(number);
}

std::vector<std::int64_t> natural_numbers(const nlohmann::json& value, const char* what) {
  TESSERA_CHECK(value.is_array(), what, " is not a list");
  TESSERA_CHECK(value.size() <= kMaxDims, what, " has ", value.size(), " dimensions");
  std::vector<std::int64_t> numbers;
  for (const auto& element : value) {
    numbers.push_back(natural_number(element, what));
  }
  return numbers;
}

namespace {

using nlohmann::json;

/// The limits of the JSON of a header. Depth 3: the top-level object, the object of a tensor, and
/// the lists in this object.
constexpr JsonLimits kHeaderLimits{.depth = 3, .keys = 1'000'000, .values = 4'000'000};

/// Parses a tensor's type. Types that libtorch lacks are accepted when a header is parsed; only
/// reading such a tensor fails.
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
  // The three required fields are present, so any fourth field is unknown.
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

/// Parses "__metadata__". null counts as no metadata, as in Hugging Face's reader.
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

/// Throws Error unless the tensors cover the data exactly: no holes, which could hide data, and no
/// overlaps, which would give the same data two names. Tensors are sorted by offset, then by size,
/// so that an empty tensor precedes the tensor that begins at the same offset.
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
    // "__metadata__" is the only key that is not a tensor.
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

namespace {

using Item = SafetensorsWriter::Item;

/// The format's type for libtorch's type. Throws Error for complex double and quantized types,
/// which the format lacks.
const SafetensorsDtype& dtype_of(const Item& item) {
  const auto* dtype = find_dtype(item.dtype);
  TESSERA_CHECK(dtype != nullptr, "tensor '", item.name, "' has the type ",
                c10::toString(item.dtype), ", which safetensors lacks: convert it first");
  return *dtype;
}

/// Returns `text` as a JSON string literal. nlohmann escapes the text as the format requires, and
/// throws for invalid UTF-8.
std::string json_text(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    fail("a name or a metadata value is not valid UTF-8: rename it");
  }
}

/// The text of "__metadata__", which comes first in the header, as in the reference implementation.
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
  // Tensors with the widest types come first, so that all data are aligned.
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
  // Padding the header to a multiple of 8 aligns the data, because the header's length field takes
  // 8 bytes.
  plan.json.resize((plan.json.size() + 7) / 8 * 8, ' ');
  TESSERA_CHECK(plan.json.size() <= kMaxHeaderBytes, items.size(),
                " tensors are too many for one safetensors file: write several");
  return plan;
}

}  // namespace tessera::checkpoint
