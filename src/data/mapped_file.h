#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace tessera::data {

/// A regular file, mapped for reading while this lives. Throws Error if it can't be.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace tessera::data
