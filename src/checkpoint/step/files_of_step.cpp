#include "step/files_of_step.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <system_error>

#include "tessera/core/detail/read_error.h"
#include "tessera/core/error.h"
#include "tessera/core/input_file.h"

namespace tessera::checkpoint {

/// The size before the header is read: a file of another size is missing a part, or is another.
SafetensorsFile open_file_of_step(const std::filesystem::path& folder, const FileRecord& record) {
  const std::filesystem::path path = folder / record.name;
  std::error_code error;
  const auto found = std::filesystem::file_size(path, error);
  if (error) {
    throw detail::ReadError(
        detail::concat("the file '", path.string(), "' of the step can't be looked at: ",
                       error.message(), ": copy the whole folder, or load another step"),
        error == std::errc::no_such_file_or_directory ? path : std::filesystem::path());
  }
  if (found != record.bytes) {
    const files::InputFile refuses_lfs_pointers(path, "a file of a step", Symlinks::kRefuse);
  }
  TESSERA_CHECK(found == record.bytes, "'", path.string(), "' has ", found,
                " bytes, but the manifest says ", record.bytes,
                ": copy it again, or load another step");
  return SafetensorsFile(path, Symlinks::kRefuse, record.sums);
}

void check_entry(const SafetensorsFile& file, const std::string& name, const ManifestTensor& tensor,
                 const ManifestChunk& chunk) {
  const TensorEntry& entry = file.entry(name);
  TESSERA_CHECK(entry.dtype_name == tensor.dtype && entry.sizes == chunk.sizes, "tensor '", name,
                "' of '", file.path().string(), "' is ", entry.dtype_name,
                fmt::format(" [{}], but the manifest says ", fmt::join(entry.sizes, ", ")),
                tensor.dtype, fmt::format(" [{}]", fmt::join(chunk.sizes, ", ")),
                ": copy the step again, or load another");
}

}  // namespace tessera::checkpoint
