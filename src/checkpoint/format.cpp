#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "format.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::checkpoint {
namespace {

using SizesRef = std::span<const std::int64_t>;

std::vector<std::int64_t> row_major_strides(SizesRef sizes) {
  std::vector<std::int64_t> strides(sizes.size(), 1);
  for (std::size_t dim = sizes.size(); dim-- > 1;) {
    strides[dim - 1] = strides[dim] * sizes[dim];
  }
  return strides;
}

/// Returns the number k such that each index of the first k dimensions of a block selects one
/// contiguous range of the tensor.
std::size_t outer_dims(SizesRef sizes, SizesRef block) {
  std::size_t dim = sizes.size();
  while (dim > 0 && block[dim - 1] == sizes[dim - 1]) {
    --dim;
  }
  return dim == 0 ? 0 : dim - 1;
}

/// Advances `index` to the next element of a block of sizes `block`, in row-major order. Returns
/// false after the last element.
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
                block.size(), " dimensions does not fit a tensor of ", sizes.size(), " dimensions");
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    TESSERA_CHECK(offset[dim] >= 0 && block[dim] >= 0 && block[dim] <= sizes[dim] &&
                      offset[dim] <= sizes[dim] - block[dim],
                  "a block covers positions [", offset[dim], ", ", offset[dim], " + ", block[dim],
                  ") of dimension ", dim, ", but the size of the dimension is ", sizes[dim]);
  }
}

void for_each_run(SizesRef sizes, SizesRef offset, SizesRef block,
                  const std::function<void(std::int64_t, std::int64_t)>& visit) {
  if (std::find(block.begin(), block.end(), 0) != block.end()) {
    return;
  }
  const auto strides = row_major_strides(sizes);
  const auto outer = outer_dims(sizes, block);
  const auto count = product(block.subspan(outer));
  const auto first =
      std::inner_product(offset.begin(), offset.end(), strides.begin(), std::int64_t{0});
  std::vector<std::int64_t> index(outer, 0);
  do {
    visit(std::inner_product(index.begin(), index.end(), strides.begin(), first), count);
  } while (advance(index, block.first(outer)));
}

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

std::vector<Box> owned_blocks(const at::Tensor& tensor) {
  const auto sizes = tensor.sizes();
  const std::vector<std::int64_t> zeros(sizes.size(), 0);
  if (!tessera::is_distributed(tensor)) {
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

at::Tensor local_block(const at::Tensor& local, const Box& box) {
  return block_at(local, box.local_offset, box.sizes);
}

std::uint32_t read_and_sum(const files::InputFile& file, std::uint64_t offset,
                           std::span<std::byte> out) {
  // Sums 256 KiB at a time, while the bytes are still in the L2 cache. With 1 MiB at a time, the
  // checksums took 1.9 times as long.
  constexpr std::size_t kCachedBytes = std::size_t{256} << 10;
  std::uint32_t sum = 0;
  while (!out.empty()) {
    const auto part = out.first(std::min(kCachedBytes, out.size()));
    file.read_at(offset, part);
    sum = tessera::detail::crc32c(part, sum);
    offset += part.size();
    out = out.subspan(part.size());
  }
  return sum;
}

void GranuleSums::add(std::uint64_t offset, std::span<const std::byte> bytes) {
  TESSERA_CHECK(offset == bytes_, "bytes were written at offset ", offset, " of a file that has ",
                bytes_, " bytes so far: write the file in order, without gaps");
  while (!bytes.empty()) {
    if (bytes_ % kGranuleBytes == 0) {
      sums_.push_back(0);
    }
    const auto room = kGranuleBytes - bytes_ % kGranuleBytes;
    const auto part = bytes.first(std::min<std::uint64_t>(room, bytes.size()));
    sums_.back() = tessera::detail::crc32c(part, sums_.back());
    bytes_ += part.size();
    bytes = bytes.subspan(part.size());
  }
}

namespace {

using c10::ScalarType;

/// The safetensors dtypes that libtorch supports. The order is that of the safetensors library,
/// which sorts a file's tensors by dtype.
constexpr SafetensorsDtype kDtypes[] = {
    {"BOOL", ScalarType::Bool},
    {"U8", ScalarType::Byte},
    {"I8", ScalarType::Char},
    {"F8_E5M2", ScalarType::Float8_e5m2},
    {"F8_E4M3", ScalarType::Float8_e4m3fn},
    {"F8_E8M0", ScalarType::Float8_e8m0fnu},
    {"F8_E4M3FNUZ", ScalarType::Float8_e4m3fnuz},
    {"F8_E5M2FNUZ", ScalarType::Float8_e5m2fnuz},
    {"I16", ScalarType::Short},
    {"U16", ScalarType::UInt16},
    {"F16", ScalarType::Half},
    {"BF16", ScalarType::BFloat16},
    {"I32", ScalarType::Int},
    {"U32", ScalarType::UInt32},
    {"F32", ScalarType::Float},
    {"C64", ScalarType::ComplexFloat},
    {"F64", ScalarType::Double},
    {"I64", ScalarType::Long},
    {"U64", ScalarType::UInt64},
};

template <class Predicate>
const SafetensorsDtype* find_where(Predicate predicate) {
  const auto* found = std::find_if(std::begin(kDtypes), std::end(kDtypes), predicate);
  return found == std::end(kDtypes) ? nullptr : found;
}

/// Whether UTF-8 text begins with a control character (U+0000 to U+001F, U+007F to U+009F) or a
/// bidirectional override (U+202A to U+202E, U+2066 to U+2069).
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
  return find_where([&](const SafetensorsDtype& dtype) { return dtype.scalar_type == type; });
}

std::uint64_t tensor_bytes(std::span<const std::int64_t> sizes, const SafetensorsDtype& dtype) {
  // A size of 0 counts as 1, so that the product of the other sizes is checked for overflow.
  std::int64_t positions = 1;
  for (const auto size : sizes) {
    TESSERA_CHECK(!__builtin_mul_overflow(positions, std::max<std::int64_t>(size, 1), &positions),
                  "the number of elements overflows 64 bits");
  }
  const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  std::uint64_t bytes = 0;
  TESSERA_CHECK(
      !__builtin_mul_overflow(empty ? 0 : positions, c10::elementSize(dtype.scalar_type), &bytes),
      "the number of bytes overflows 64 bits");
  return bytes;
}

bool has_control_character(std::string_view text) {
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (begins_with_control(text.substr(i))) {
      return true;
    }
  }
  return false;
}

std::string ascii(const nlohmann::json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
}

/// Throws Error for an unsafe tensor name. The format allows any string, but programs use names as
/// file names and print names to terminals.
void check_tensor_name(std::string_view name) {
  constexpr std::size_t kMaxNameBytes = 4096;
  TESSERA_CHECK(!name.empty(), "a tensor's name is empty");
  TESSERA_CHECK(name.size() <= kMaxNameBytes, "a tensor's name has ", name.size(),
                " bytes, but the limit is ", kMaxNameBytes);
  TESSERA_CHECK(!has_control_character(name), "a tensor's name has a control character");
  TESSERA_CHECK(name != "__metadata__",
                "the tensor name '__metadata__' is reserved by safetensors: rename the tensor");
  TESSERA_CHECK(
      name.find_first_of("/\\") == std::string::npos && name.find("..") == std::string::npos,
      "the tensor name '", name, "' looks like a path: use a name without '/', '\\' and '..'");
}

/// Returns a natural number from JSON. The JSON parser stores natural numbers below 2^64, and no
/// other values, in an unsigned type.
std::int64_t natural_number(const nlohmann::json& value, const char* what) {
  TESSERA_CHECK(value.is_number_unsigned(), what, ": ",
                value.is_number() ? value.dump() : value.type_name(),
                " is not an integer of at least 0");
  const auto number = value.get<std::uint64_t>();
  TESSERA_CHECK(std::in_range<std::int64_t>(number), what, ": ", number, " is too large");
  return static_cast<std::int64_t>(number);
}

std::vector<std::int64_t> natural_numbers(const nlohmann::json& value, const char* what) {
  constexpr std::size_t kMaxDims = 64;  // libtorch's limit on the dimensions of a tensor
  TESSERA_CHECK(value.is_array(), what, " is not a list");
  TESSERA_CHECK(value.size() <= kMaxDims, what, " has ", value.size(),
                " dimensions, but the limit is ", kMaxDims);
  std::vector<std::int64_t> numbers;
  for (const auto& element : value) {
    numbers.push_back(natural_number(element, what));
  }
  return numbers;
}

}  // namespace tessera::checkpoint
