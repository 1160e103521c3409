#pragma once

#include <string>
#include <vector>

namespace llama {

/// The files of all patterns, those of each in byte order, each file once, at its first place. A
/// pattern that is the name of a file is that file. `flag`: where the patterns were given, for
/// messages. Throws tessera::Error for one without a file.
std::vector<std::string> list_files(const std::string& flag,
                                    const std::vector<std::string>& patterns);

}  // namespace llama
