// Writes one file, block by block and in any order: the header is complete before the first block,
// because sizes and types are announced. Missing bytes are counted without their place: a block
// that is written twice instead of another of its size is not noticed.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "blocks/blocks.h"
#include "safetensors/safetensors_header.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/comm/detail/rank_threads.h"
#include "tessera/core/atomic_file.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

/// After each of these other ranks see that this one makes progress.
constexpr std::size_t kPieceBytes = std::size_t{16} << 20;

}  // namespace

struct SafetensorsWriter::Impl {
  Impl(const std::filesystem::path& path, HeaderPlan planned, OnWrite observer)
      : path(path.string()), plan(std::move(planned)), file(path), on_write(std::move(observer)) {
    const std::uint64_t header_bytes = plan.json.size();
    data_begin = sizeof(header_bytes) + header_bytes;
    // A full disk is an Error here, and not after everything was gathered.
    file.reserve(data_begin + plan.data_bytes);
    write_at(0, std::as_bytes(std::span(&header_bytes, 1)));
    write_at(sizeof(header_bytes), std::as_bytes(std::span(plan.json)));
    for (const auto& [name, entry] : plan.tensors) {
      missing.emplace(name, entry.bytes);
    }
  }

  void write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const auto piece = bytes.first(std::min(bytes.size(), kPieceBytes));
      file.write_at(offset, piece);
      comm::note_progress(flight::Work::kWriting);
      if (on_write) {
        on_write(offset, piece);
      }
      offset += piece.size();
      bytes = bytes.subspan(piece.size());
    }
  }

  const TensorEntry& entry(const std::string& name) const {
    const auto found = plan.tensors.find(name);
    TESSERA_CHECK(found != plan.tensors.end(), "tensor '", name, "' was not announced for '", path,
                  "': list it among the items");
    return found->second;
  }

  /// Counts `bytes` of a tensor as written.
  void count(const std::string& name, std::uint64_t bytes) {
    auto& left = missing.at(name);
    TESSERA_CHECK(bytes <= left, "tensor '", name, "' was written twice to '", path,
                  "': write each element once");
    left -= bytes;
  }

  std::string path;
  HeaderPlan plan;
  files::AtomicFile file;
  OnWrite on_write;
  std::uint64_t data_begin = 0;
  std::map<std::string, std::uint64_t> missing;  ///< bytes of each tensor still to be written
};

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     const std::vector<Item>& items,
                                     const std::map<std::string, std::string>& metadata,
                                     OnWrite on_write)
    : impl_(std::make_unique<Impl>(path, plan_header(items, metadata), std::move(on_write))) {}

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
                tensor.sizes(), ", announced were ", at::IntArrayRef(entry.sizes),
                ": write what was announced");
  write(name, std::vector<std::int64_t>(entry.sizes.size(), 0), tensor);
}

void SafetensorsWriter::write(const std::string& name, std::span<const std::int64_t> offset,
                              const at::Tensor& block) {
  const auto& entry = impl_->entry(name);
  TESSERA_CHECK(block.scalar_type() == entry.dtype, "tensor '", name, "' has the type ",
                c10::toString(block.scalar_type()), ", announced was ", c10::toString(entry.dtype),
                ": convert it first");
  const std::span<const std::int64_t> sizes(block.sizes().data(), block.sizes().size());
  check_block(entry.sizes, offset, sizes);
  // Conjugated and negated views hold other bytes than they mean.
  const auto local = block.detach().resolve_conj().resolve_neg().cpu().contiguous();
  impl_->count(name, local.nbytes());
  std::span bytes(static_cast<const std::byte*>(local.const_data_ptr()), local.nbytes());
  const auto itemsize = static_cast<std::uint64_t>(block.element_size());
  for_each_run(entry.sizes, offset, sizes, [&](std::int64_t element, std::int64_t count) {
    const auto run = static_cast<std::uint64_t>(count) * itemsize;
    impl_->write_at(
        impl_->data_begin + entry.offset + static_cast<std::uint64_t>(element) * itemsize,
        bytes.first(run));
    // The runs of a block are in its own row-major order, so its bytes are taken one after another.
    bytes = bytes.subspan(run);
  });
}

/// sync() before the rename of publish(): after a crash the name must not stand for an incomplete
/// file.
void SafetensorsWriter::seal() {
  for (const auto& [name, bytes] : impl_->missing) {
    TESSERA_CHECK(bytes == 0, bytes, " bytes of tensor '", name, "' were not written to '",
                  impl_->path, "': write every tensor before finish()");
  }
  impl_->file.sync();
  comm::note_progress(flight::Work::kWriting);
}

void SafetensorsWriter::publish() {
  impl_->file.publish();
}

void SafetensorsWriter::finish() {
  seal();
  publish();
}

}  // namespace tessera::checkpoint
