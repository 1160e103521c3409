// Files and folders that flags name.

#pragma once

#include <string>
#include <vector>

namespace llama {

/// A file or folder of a program.
struct NamedFile {
  std::string what;  ///< as an error says it: "--trace", "report.html of --metrics"
  std::string path;  ///< "": none; of what is read also a glob, or the folder of a model
  bool is_read = false;
};

/// Throws tessera::Error where two of them are one, however they are written and by whatever links,
/// and one of these is written: it would replace the other, or be written into it. What is read are
/// also the files that a glob matches, and those of a model in a folder.
void check_files_differ(const std::vector<NamedFile>& files);

}  // namespace llama
