#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "compare/rank_parts.h"

namespace tessera::observe {

/// A tensor of a recorded run.
struct RecordedTensor {
  RankParts parts;
  std::string layout;  ///< for messages
};

/// The tensors of a run in a folder: a safetensors file for each, written as it comes, and
/// recording.json, written last, whose presence says that the recording is complete. One rank uses
/// it.
class Recording {
 public:
  /// A folder that does not exist or is empty is recorded into, another one is read. Throws Error
  /// for one that holds something else, or a recording that did not end.
  explicit Recording(std::filesystem::path folder);

  const std::filesystem::path& folder() const { return folder_; }
  /// Whether it was there before: this run is compared with it.
  bool complete() const { return complete_; }
  std::size_t size() const { return entries_.size(); }
  /// The mesh of the recorded run.
  const std::string& mesh() const { return mesh_; }
  /// The recorded steps.
  std::int64_t steps() const { return steps_; }

  /// `name`: what the tensor is, "step 1: the output of 'norm'"; unique.
  void add(const std::string& name, const RankParts& parts, const std::string& layout);
  void finish(const std::string& mesh, std::int64_t steps);

  /// nullopt if the recorded run had none of this name.
  std::optional<RecordedTensor> find(const std::string& name);
  /// The recorded tensors of a step that find() was not called for.
  std::vector<std::string> not_found(std::int64_t step) const;

 private:
  struct Entry {
    std::string name;
    std::string file;
    std::int64_t batches = 1;
    std::vector<std::string> ranks;
    std::vector<std::size_t> tensors;  ///< of each rank: its number in the file
    std::string layout;
    bool found = false;
  };

  void read();
  std::string manifest() const;

  std::filesystem::path folder_;
  bool complete_ = false;
  std::string mesh_;
  std::int64_t steps_ = 0;
  std::vector<Entry> entries_;  // as they came
  std::map<std::string, std::size_t> index_;
};

/// "step 3: ", with which the names of a step's tensors begin.
std::string step_prefix(std::int64_t step);

}  // namespace tessera::observe
