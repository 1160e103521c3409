// Reads and writes safetensors files block by block.

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "format.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/detail/files.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::checkpoint {

// CheckedFile and the header types are not in the unnamed namespace, because members of
// SafetensorsFile::Impl and SafetensorsWriter::Impl have these types.

/// A file whose bytes are verified against checksums when the bytes are read. Thread safe.
class CheckedFile {
 public:
  /// `sums`: the checksum of each 1 MiB of the file; an empty list disables verification. Throws
  /// Error if the number of checksums does not fit the file size.
  CheckedFile(files::InputFile file, std::vector<std::uint32_t> sums)
      : file_(std::move(file)), sums_(std::move(sums)) {
    TESSERA_CHECK(sums_.empty() || sums_.size() == granules_of(file_.size()), "'", path().string(),
                  "' has ", file_.size(), " bytes, but the manifest has checksums for ",
                  sums_.size(), " MiB: copy the file again");
  }

  const std::filesystem::path& path() const { return file_.path(); }
  std::uint64_t size() const { return file_.size(); }

  /// Reads bytes of the file and verifies every 1 MiB block that contains some of these bytes.
  /// Throws Error for a wrong checksum.
  void read_at(std::uint64_t offset, std::span<std::byte> out) const {
    // If the range ends beyond the end of the file, InputFile throws an Error with the reason.
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

 private:
  struct CachedGranule {
    std::vector<std::byte> bytes;
    std::uint64_t index = UINT64_MAX;
  };

  std::uint64_t bytes_of_granule(std::uint64_t index) const {
    return std::min(kGranuleBytes, size() - index * kGranuleBytes);
  }

  void read_granule(std::uint64_t index, std::span<std::byte> out) const {
    const std::uint64_t begin = index * kGranuleBytes;
    const std::uint32_t found = read_and_sum(file_, begin, out);
    TESSERA_CHECK(found == sums_[index], "bytes ", begin, " to ", begin + out.size() - 1, " of '",
                  path().string(), "' differ from the saved bytes (CRC-32C ",
                  fmt::format("{:08x}, expected {:08x}", found, sums_[index]),
                  "): copy the file again, or load another step");
  }

  CachedGranule& cache_of_this_thread() const {
    const std::lock_guard lock(mutex_);
    return cache_[std::this_thread::get_id()];
  }

  void read_part(std::uint64_t index, std::uint64_t within, std::span<std::byte> out) const {
    CachedGranule& cached = cache_of_this_thread();
    if (cached.index != index) {
      // The cached 1 MiB block is invalid until its checksum has been verified.
      cached.index = UINT64_MAX;
      cached.bytes.resize(bytes_of_granule(index));
      read_granule(index, cached.bytes);
      cached.index = index;
    }
    std::memcpy(out.data(), cached.bytes.data() + within, out.size());
  }

  files::InputFile file_;
  std::vector<std::uint32_t> sums_;
  // The last 1 MiB block that each thread has read. One block is enough, because a thread reads
  // ranges in ascending order. The mutex protects only the map.
  mutable std::mutex mutex_;
  mutable std::map<std::thread::id, CachedGranule> cache_;
};

struct SafetensorsHeader {
  /// The tensors by name. Offsets are relative to the start of the data, after the header.
  std::map<std::string, TensorEntry> tensors;
  std::map<std::string, std::string> metadata;
};

/// The header of a file to be written, padded to a multiple of 8 bytes, and each tensor's offset
/// from the start of the data.
struct HeaderPlan {
  std::string json;
  std::map<std::string, TensorEntry> tensors;
  std::uint64_t data_bytes = 0;
};

namespace {

using nlohmann::json;

/// The largest header that Hugging Face's safetensors library accepts.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

/// Limits for the JSON header of a safetensors file. Depth 3: the top-level object, the object of a
/// tensor, and the lists in this object.
constexpr JsonLimits kHeaderLimits{.depth = 3, .keys = 1'000'000, .values = 4'000'000};

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
  TESSERA_CHECK(value.size() == 3, "its entry has fields besides dtype, shape and data_offsets");
  TESSERA_CHECK(offsets.is_array() && offsets.size() == 2, "its data_offsets are not two numbers");
  const auto begin = natural_number(offsets[0], "its data_offsets");
  const auto end = natural_number(offsets[1], "its data_offsets");
  TESSERA_CHECK(begin <= end, "its data end at ", end, ", before they begin at ", begin);
  TESSERA_CHECK(std::cmp_less_equal(end, data_bytes), "its data end at ", end,
                ", but the file has only ", data_bytes, " bytes of data: the file is truncated");
  entry.offset = static_cast<std::uint64_t>(begin);
  entry.bytes = tensor_bytes(entry.sizes, dtype);
  TESSERA_CHECK(std::cmp_equal(end - begin, entry.bytes), "its data have ", end - begin,
                " bytes, but its shape and dtype need ", entry.bytes);
  return entry;
}

/// Parses "__metadata__". The value null means no metadata, as in Hugging Face's reader.
std::map<std::string, std::string> parse_metadata(const json& value) {
  TESSERA_CHECK(value.is_object() || value.is_null(), "__metadata__ is not an object");
  std::map<std::string, std::string> metadata;
  for (const auto& [key, text] : value.items()) {
    TESSERA_CHECK(text.is_string(), "the value of ", json(key).dump(),
                  " in __metadata__ is of type ", text.type_name(), ", not a string");
    metadata.emplace(key, text.get<std::string>());
  }
  return metadata;
}

/// Throws Error unless the tensors cover the file's data without gaps or overlaps. An empty tensor
/// precedes the tensor that begins at the same offset.
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
                  item->second.offset, ", but the data of the previous tensor end at ", end);
    end += item->second.bytes;
  }
  TESSERA_CHECK(end == data_bytes, "the tensors' data end at ", end, ", but the file has ",
                data_bytes, " bytes of data");
}

/// Parses and checks the header of a safetensors file with `data_bytes` bytes of data. Throws
/// Error, with the name of the tensor, for everything that the format forbids.
SafetensorsHeader parse_header(std::string_view text, std::uint64_t data_bytes) {
  const json root = tessera::detail::parse_strict_json(text, kHeaderLimits);
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

using Item = SafetensorsWriter::Item;

/// Returns the safetensors type for a libtorch type. Throws Error for types that the format lacks:
/// complex double and quantized types.
const SafetensorsDtype* dtype_of(const Item& item) {
  const auto* dtype = find_dtype(item.dtype);
  TESSERA_CHECK(dtype != nullptr, "tensor '", item.name, "' has the type ",
                c10::toString(item.dtype), ", which safetensors lacks: convert the tensor first");
  return dtype;
}

/// Returns `text` as a JSON string literal. nlohmann escapes the text as the format requires, and
/// throws for invalid UTF-8.
std::string json_text(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    fail("a tensor name or a metadata value is not valid UTF-8: use UTF-8 text");
  }
}

/// Returns the text of "__metadata__", the first entry of the header, as in Hugging Face's library.
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

HeaderPlan plan_header(std::vector<Item> items,
                       const std::map<std::string, std::string>& metadata) {
  // Tensors are sorted by dtype, from wide to narrow, so that the data of all tensors are aligned.
  std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
    return std::pair(dtype_of(b), a.name) < std::pair(dtype_of(a), b.name);
  });
  HeaderPlan plan;
  std::vector<std::string> parts;
  if (!metadata.empty()) {
    parts.push_back(metadata_json(metadata));
  }
  for (auto& item : items) {
    check_tensor_name(item.name);
    const SafetensorsDtype& dtype = *dtype_of(item);
    TensorEntry entry{std::string(dtype.name), item.dtype, std::move(item.sizes), plan.data_bytes};
    entry.bytes = tensor_bytes(entry.sizes, dtype);
    plan.data_bytes += entry.bytes;
    parts.push_back(entry_json(item.name, entry));
    TESSERA_CHECK(plan.tensors.emplace(item.name, std::move(entry)).second,
                  "two tensors are named '", item.name, "': rename one of them");
  }
  plan.json = fmt::format("{{{}}}", fmt::join(parts, ","));
  // The header follows its 8-byte length and precedes the data. Padding the header to a multiple of
  // 8 bytes aligns the data.
  plan.json.resize((plan.json.size() + 7) / 8 * 8, ' ');
  TESSERA_CHECK(plan.json.size() <= kMaxHeaderBytes, items.size(),
                " tensors are too many for one safetensors file: write several files");
  return plan;
}

// RunReader reads neighbouring byte ranges, and the gaps between them, with one system call. A
// column-wise shard can have thousands of short ranges.

/// Reads byte ranges of a file into consecutive memory. The ranges must be in ascending order.
class RunReader {
 public:
  RunReader(const CheckedFile& file, std::byte* out) : file_(file), out_(out) {}

  void add(std::uint64_t offset, std::uint64_t count) {
    const bool near = !runs_.empty() && offset - end_ <= kMaxGap &&
                      offset + count - runs_.front().offset <= kMaxSpan;
    if (!near) {
      flush();
    }
    runs_.push_back({offset, count});
    end_ = offset + count;
  }

  void flush() {
    if (runs_.size() == 1) {
      file_.read_at(end_ - runs_[0].count, {out_, runs_[0].count});
    }
    if (runs_.size() > 1) {
      read_together();
    }
    for (const auto& run : runs_) {
      out_ += run.count;
    }
    runs_.clear();
  }

 private:
  /// The largest gap between two ranges that are read together. Reading 3.5 KiB of every 28 KiB
  /// together from a cold disk was 10 times as fast. With gaps of 100 KiB, reading together was
  /// slower.
  static constexpr std::uint64_t kMaxGap = std::uint64_t{64} << 10;
  /// The maximum number of bytes that are read together, which limits the size of the buffer.
  static constexpr std::uint64_t kMaxSpan = 1 << 20;

  struct Run {
    std::uint64_t offset;
    std::uint64_t count;
  };

  void read_together() {
    const auto begin = runs_.front().offset;
    buffer_.resize(end_ - begin);
    file_.read_at(begin, buffer_);
    auto* out = out_;
    for (const auto& run : runs_) {
      std::memcpy(out, buffer_.data() + (run.offset - begin), run.count);
      out += run.count;
    }
  }

  const CheckedFile& file_;
  std::byte* out_;
  std::uint64_t end_ = 0;
  std::vector<Run> runs_;
  std::vector<std::byte> buffer_;
};

static_assert(std::endian::native == std::endian::little, "safetensors is little endian");

constexpr const char* kAdvice = ": copy or write the file again";

}  // namespace

struct SafetensorsFile::Impl {
  Impl(files::InputFile opened, std::vector<std::uint32_t> sums)
      : file(std::move(opened), std::move(sums)) {}

  CheckedFile file;
  SafetensorsHeader header;

  /// Reads and checks the header. An Error about the header's content names the file and gives
  /// advice; errors of opening and reading the file are not changed.
  void read_header();

 private:
  std::string invalid() const {
    return "'" + file.path().string() + "' is not a valid safetensors file: ";
  }
};

void SafetensorsFile::Impl::read_header() {
  const std::uint64_t file_bytes = file.size();
  std::uint64_t header_bytes = 0;
  TESSERA_CHECK(file_bytes >= sizeof(header_bytes), invalid(), "it has only ", file_bytes,
                " bytes: the file is truncated", kAdvice);
  file.read_at(0, std::as_writable_bytes(std::span(&header_bytes, 1)));
  // The header's length comes from the file, so the length is checked before memory is allocated.
  TESSERA_CHECK(header_bytes <= kMaxHeaderBytes, invalid(), "its header has a length of ",
                header_bytes, " bytes, but the limit is ", kMaxHeaderBytes, kAdvice);
  const std::uint64_t data_begin = sizeof(header_bytes) + header_bytes;
  TESSERA_CHECK(data_begin <= file_bytes, invalid(), "its header ends at ", data_begin,
                ", but the file has only ", file_bytes, " bytes: the file is truncated", kAdvice);
  std::string json(header_bytes, '\0');
  file.read_at(sizeof(header_bytes), std::as_writable_bytes(std::span(json)));
  try {
    header = parse_header(json, file_bytes - data_begin);
  } catch (const Error& error) {
    fail(invalid(), error.what(), kAdvice);
  }
  // parse_header() counts offsets from the end of the header. Callers of tensors() get offsets from
  // the start of the file.
  for (auto& [name, entry] : header.tensors) {
    entry.offset += data_begin;
  }
}

namespace {

/// Throws Error for a bool that is neither 0 nor 1, because using such a bool would be undefined
/// behaviour.
void check_bools(const at::Tensor& tensor, const std::string& name) {
  if (tensor.scalar_type() != at::kBool) {
    return;
  }
  const auto* bytes = static_cast<const unsigned char*>(tensor.const_data_ptr());
  const bool valid =
      std::all_of(bytes, bytes + tensor.numel(), [](unsigned char byte) { return byte <= 1; });
  TESSERA_CHECK(valid, "tensor '", name,
                "' of type BOOL has a byte that is neither 0 nor 1: write the file again");
}

/// Whether a file's bytes can be read directly into the memory of `block`. False for bools, because
/// the bytes of bools must be checked before use.
bool takes_bytes(const at::Tensor& block, c10::ScalarType type) {
  return block.is_cpu() && block.is_contiguous() && block.scalar_type() == type &&
         type != at::kBool;
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path, Symlinks symlinks,
                                 std::vector<std::uint32_t> sums)
    : impl_(std::make_unique<Impl>(files::InputFile(path, "a safetensors file", symlinks),
                                   std::move(sums))) {
  impl_->read_header();
}

SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;

const std::map<std::string, TensorEntry>& SafetensorsFile::tensors() const {
  return impl_->header.tensors;
}
const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return impl_->header.metadata;
}
const std::filesystem::path& SafetensorsFile::path() const {
  return impl_->file.path();
}

const TensorEntry& SafetensorsFile::entry(const std::string& name) const {
  const auto found = tensors().find(name);
  TESSERA_CHECK(found != tensors().end(), "'", path().string(), "' has no tensor '", name,
                "': pass the file that belongs to this model");
  return found->second;
}

const TensorEntry& SafetensorsFile::entry_with(const std::string& name,
                                               std::span<const std::int64_t> offset,
                                               std::span<const std::int64_t> sizes) const {
  const auto& item = entry(name);
  // `offset` is inside the tensor, and the header's entries are inside the file, so every byte of
  // the block is inside the file.
  check_block(item.sizes, offset, sizes);
  return item;
}

void SafetensorsFile::read_bytes(const TensorEntry& item, std::span<const std::int64_t> offset,
                                 const at::Tensor& out) const {
  const auto itemsize = static_cast<std::uint64_t>(out.element_size());
  const std::span<const std::int64_t> sizes(out.sizes().data(), out.sizes().size());
  RunReader reader(impl_->file, static_cast<std::byte*>(out.mutable_data_ptr()));
  for_each_run(item.sizes, offset, sizes, [&](std::int64_t element, std::int64_t count) {
    reader.add(item.offset + static_cast<std::uint64_t>(element) * itemsize,
               static_cast<std::uint64_t>(count) * itemsize);
  });
  reader.flush();
}

at::Tensor SafetensorsFile::read(const std::string& name, std::span<const std::int64_t> offset,
                                 std::span<const std::int64_t> sizes) const {
  const TensorEntry& item = entry_with(name, offset, sizes);
  auto result =
      at::empty(at::IntArrayRef(sizes.data(), sizes.size()), at::TensorOptions(item.dtype));
  read_bytes(item, offset, result);
  check_bools(result, name);
  return result;
}

at::Tensor SafetensorsFile::read(const std::string& name) const {
  const auto& sizes = entry(name).sizes;
  return read(name, std::vector<std::int64_t>(sizes.size(), 0), sizes);
}

void SafetensorsFile::read_into(const std::string& name, std::span<const std::int64_t> offset,
                                const at::Tensor& block) const {
  const std::span<const std::int64_t> sizes(block.sizes().data(), block.sizes().size());
  const TensorEntry& item = entry_with(name, offset, sizes);
  if (takes_bytes(block, item.dtype)) {
    read_bytes(item, offset, block);
    // The direct read into the tensor increments the tensor's version counter, as copy_() would.
    tessera::detail::count_write(block);
  } else {
    block.copy_(read(name, offset, sizes));
  }
}

struct SafetensorsWriter::Impl {
  Impl(const std::filesystem::path& path, HeaderPlan planned, GranuleSums* granule_sums)
      : path(path.string()), plan(std::move(planned)), file(path), sums(granule_sums) {
    const std::uint64_t header_bytes = plan.json.size();
    data_begin = sizeof(header_bytes) + header_bytes;
    // Reserves the disk space, so that a full disk throws Error before any data are gathered.
    file.reserve(data_begin + plan.data_bytes);
    write_at(0, std::as_bytes(std::span(&header_bytes, 1)));
    write_at(sizeof(header_bytes), std::as_bytes(std::span(plan.json)));
    for (const auto& [name, entry] : plan.tensors) {
      missing.emplace(name, entry.bytes);
    }
  }

  void write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
    constexpr std::size_t kPieceBytes = std::size_t{16} << 20;
    while (!bytes.empty()) {
      const auto piece = bytes.first(std::min(bytes.size(), kPieceBytes));
      file.write_at(offset, piece);
      if (sums != nullptr) {
        sums->add(offset, piece);
      }
      offset += piece.size();
      bytes = bytes.subspan(piece.size());
    }
  }

  const TensorEntry& entry(const std::string& name) const {
    const auto found = plan.tensors.find(name);
    TESSERA_CHECK(found != plan.tensors.end(), "tensor '", name,
                  "' is not in the items of the SafetensorsWriter for '", path,
                  "': add the tensor to the items");
    return found->second;
  }

  void count(const std::string& name, std::uint64_t bytes) {
    auto& left = missing.at(name);
    TESSERA_CHECK(bytes <= left, "tensor '", name, "' was written twice to '", path,
                  "': write each element once");
    left -= bytes;
  }

  std::string path;
  HeaderPlan plan;
  files::AtomicFile file;
  GranuleSums* sums;
  std::uint64_t data_begin = 0;
  /// The number of bytes of each tensor that are not written yet.
  std::map<std::string, std::uint64_t> missing;
};

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     const std::vector<Item>& items,
                                     const std::map<std::string, std::string>& metadata,
                                     GranuleSums* sums)
    : impl_(std::make_unique<Impl>(path, plan_header(items, metadata), sums)) {}

SafetensorsWriter::~SafetensorsWriter() = default;
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;

std::vector<std::string> SafetensorsWriter::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : impl_->plan.tensors) {
    names.push_back(name);
  }
  std::ranges::stable_sort(names, {},
                           [this](const std::string& name) { return impl_->entry(name).offset; });
  return names;
}

void SafetensorsWriter::write(const std::string& name, const at::Tensor& tensor) {
  const auto& entry = impl_->entry(name);
  TESSERA_CHECK(tensor.sizes() == at::IntArrayRef(entry.sizes), "tensor '", name, "' has sizes ",
                tensor.sizes(), ", but its item has sizes ", at::IntArrayRef(entry.sizes),
                ": write a tensor of these sizes");
  write(name, std::vector<std::int64_t>(entry.sizes.size(), 0), tensor);
}

void SafetensorsWriter::write(const std::string& name, std::span<const std::int64_t> offset,
                              const at::Tensor& block) {
  const auto& entry = impl_->entry(name);
  TESSERA_CHECK(block.scalar_type() == entry.dtype, "tensor '", name, "' has the type ",
                c10::toString(block.scalar_type()), ", but its item has the type ",
                c10::toString(entry.dtype), ": convert the tensor first");
  const std::span<const std::int64_t> sizes(block.sizes().data(), block.sizes().size());
  check_block(entry.sizes, offset, sizes);
  const auto local = block.detach().resolve_conj().resolve_neg().cpu().contiguous();
  impl_->count(name, local.nbytes());
  std::span bytes(static_cast<const std::byte*>(local.const_data_ptr()), local.nbytes());
  const auto itemsize = static_cast<std::uint64_t>(block.element_size());
  for_each_run(entry.sizes, offset, sizes, [&](std::int64_t element, std::int64_t count) {
    const auto run = static_cast<std::uint64_t>(count) * itemsize;
    impl_->write_at(
        impl_->data_begin + entry.offset + static_cast<std::uint64_t>(element) * itemsize,
        bytes.first(run));
    bytes = bytes.subspan(run);
  });
}

/// Syncs the temporary file before publish() renames it: after a crash, the final name must not
/// refer to an incomplete file.
void SafetensorsWriter::seal() {
  for (const auto& [name, bytes] : impl_->missing) {
    TESSERA_CHECK(bytes == 0, bytes, " bytes of tensor '", name, "' were not written to '",
                  impl_->path, "': write every tensor before finish()");
  }
  impl_->file.sync();
}

void SafetensorsWriter::publish() {
  impl_->file.publish();
}

void SafetensorsWriter::finish() {
  seal();
  publish();
}

}  // namespace tessera::checkpoint
