// Renaming of the tensors of files that other code has written.

#include "hugging_face/renamed_tensors.h"

#include <optional>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/nn/fqn_pattern.h"

namespace tessera::checkpoint {
namespace {

using NamePair = std::pair<std::string, std::string>;

std::string text_of(const NamePair& pair) {
  return "{\"" + pair.first + "\", \"" + pair.second + "\"}";
}

/// The pairs of one load; each must match something.
class Renaming {
 public:
  explicit Renaming(const HuggingFaceOptions& options)
      : pairs_(options.names), used_(options.names.size()) {}

  /// The model's name of a tensor; "" for one that is to be left out.
  std::string name_of(const std::string& tensor) {
    std::optional<std::size_t> taken;
    std::string name = tensor;
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      const auto renamed = nn::renamed_fqn(pairs_[i].first, pairs_[i].second, tensor);
      if (!renamed) {
        continue;
      }
      TESSERA_CHECK(!taken, "load_hugging_face: the pairs of names ", text_of(pairs_[*taken]),
                    " and ", text_of(pairs_[i]), " both match the tensor '", tensor,
                    "'; write them so that one does");
      taken = i;
      used_[i] = true;
      name = *renamed;
    }
    return name;
  }

  void check_used(const ModelFiles& files) const {
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      TESSERA_CHECK(used_[i], "load_hugging_face: the pair of names ", text_of(pairs_[i]),
                    " matches none of the ", files.tensors().size(), " tensors in '",
                    files.folder().string(), "', of which the first is '",
                    files.tensors().empty() ? "" : files.tensors().begin()->first,
                    "'; correct or remove it");
    }
  }

 private:
  const std::vector<NamePair>& pairs_;
  std::vector<bool> used_;
};

}  // namespace

std::map<std::string, FileTensor> renamed_tensors(const ModelFiles& files,
                                                  const HuggingFaceOptions& options) {
  Renaming renaming(options);
  std::map<std::string, FileTensor> tensors;
  for (const auto& [tensor, file] : files.tensors()) {
    const std::string name = renaming.name_of(tensor);
    if (name.empty()) {
      continue;
    }
    const auto [known, is_new] = tensors.emplace(name, FileTensor{file, tensor});
    TESSERA_CHECK(is_new, "load_hugging_face: the tensors '", known->second.name, "' and '", tensor,
                  "' would both be '", name, "' of the model; correct the pairs of names");
  }
  renaming.check_used(files);
  return tensors;
}

}  // namespace tessera::checkpoint
