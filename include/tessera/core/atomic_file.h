#pragma once

#include <filesystem>
#include <string>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::files {

/// Writes `text` to a file, atomically and durably: after a crash the file has either its old
/// content or `text`. Throws Error with the system's reason.
void write_file(const std::filesystem::path& path, const std::string& text);

/// Writes a file like write_file(), unless the file exists. Returns whether the file was written.
/// If several processes call this for one path at the same time, exactly one of them writes the
/// file.
bool write_new_file(const std::filesystem::path& path, const std::string& text);

/// Makes a folder and its parent folders, and syncs them to the disk. Throws Error with the name of
/// the folder that cannot be made.
void create_folders(const std::filesystem::path& folder);

}  // namespace tessera::files
TESSERA_API_END
