// Files and folders that flags name.

#pragma once

#include <string>
#include <vector>

namespace llama {

/// A file or folder of a program.
struct NamedFile {
  std::string what;  ///< as an error says it: "--trace", "report.html of --metrics"
  std::string path;  ///< "": none
  bool is_read = false;
};

/// Throws tessera::Error where two of them are one, however they are written and by whatever links,
/// and one of these is written: it would replace the other, or be written into it.
void check_files_differ(const std::vector<NamedFile>& files);

}  // namespace llama
