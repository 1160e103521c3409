#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "model_files.h"
#include "owned_blocks.h"
#include "parameter_names.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/initialization.h"

namespace tessera::checkpoint {
namespace {

/// A parameter and the tensor of the files that fills it.
struct Match {
  nn::SlotPtr slot;
  std::string name;
  const SafetensorsFile* file;
};

/// What keeps a model and its files apart.
struct Mismatch {
  std::vector<std::string> missing, unexpected, different;

  bool empty() const { return missing.empty() && unexpected.empty() && different.empty(); }
};

/// The first names, and how many more there are.
std::string listed(const char* what, const std::vector<std::string>& names) {
  constexpr std::size_t kShown = 5;
  if (names.empty()) return "";
  const auto end = names.begin() + static_cast<std::ptrdiff_t>(std::min(kShown, names.size()));
  const auto more = names.size() > kShown ? fmt::format(" and {} more", names.size() - kShown) : "";
  return fmt::format("; {}: {}{}", what, fmt::join(names.begin(), end, ", "), more);
}

/// Older Llama exports hold this buffer; a model computes it.
bool is_computed(const std::string& name) {
  return name.ends_with("rotary_emb.inv_freq");
}

/// Formats of quantised weights mean nothing without their scales.
bool is_plain_float(c10::ScalarType type) {
  return type == c10::kFloat || type == c10::kHalf || type == c10::kBFloat16 ||
         type == c10::kDouble;
}

bool is_convertible(c10::ScalarType from, c10::ScalarType to) {
  return from == to || (is_plain_float(from) && is_plain_float(to));
}

void compare(const Match& match, Mismatch& mismatch) {
  const auto& entry = match.file->entry(match.name);
  const auto& tensor = match.slot->persistent();
  if (tensor.sizes() != at::IntArrayRef(entry.sizes)) {
    mismatch.different.push_back(fmt::format("{} (file [{}], model [{}])", match.name,
                                             fmt::join(entry.sizes, ", "),
                                             fmt::join(tensor.sizes(), ", ")));
  } else if (!is_convertible(entry.dtype, tensor.scalar_type())) {
    mismatch.different.push_back(fmt::format("{} (file {}, model {})", match.name, entry.dtype_name,
                                             c10::toString(tensor.scalar_type())));
  }
}

/// Whether values can be put into a parameter now.
void check_ready(const Match& match) {
  const auto& tensor = match.slot->persistent();
  TESSERA_CHECK(!local_tensor(tensor).is_meta(), "parameter '", match.name,
                "' has no storage: call nn::to_empty() before loading");
  TESSERA_CHECK(tensor.is_same(match.slot->get()), "parameter '", match.name,
                "' is gathered: load before the first forward, or call fsdp::reshard() first");
}

std::vector<Match> match_all(const nn::ModuleBase& module, const ModelFiles& files) {
  std::vector<Match> matches;
  Mismatch mismatch;
  std::set<std::string> known;
  for (const auto& [slot, names] : parameter_names(module)) {
    known.insert(names.begin(), names.end());
    const auto found = std::find_if(names.begin(), names.end(), [&](const std::string& name) {
      return files.tensors().contains(name);
    });
    if (found == names.end()) {
      mismatch.missing.push_back(names.front());
      continue;
    }
    matches.push_back({slot, *found, files.tensors().at(*found)});
    compare(matches.back(), mismatch);
  }
  for (const auto& [name, file] : files.tensors()) {
    if (!known.contains(name) && !is_computed(name)) mismatch.unexpected.push_back(name);
  }
  TESSERA_CHECK(mismatch.empty(), "the weights in '", files.folder().string(),
                "' do not fit the model", listed("missing", mismatch.missing),
                listed("unexpected", mismatch.unexpected), listed("different", mismatch.different),
                ": use the config.json that belongs to these weights");
  return matches;
}

void fill(const Match& match) {
  const auto& tensor = match.slot->persistent();
  const auto& local = local_tensor(tensor);
  for (const auto& box : owned_blocks(tensor)) {
    local_block(local, box).copy_(match.file->read(match.name, box.global_offset, box.sizes));
  }
  nn::mark_initialized(match.slot);
}

}  // namespace

void load_hugging_face(nn::ModuleBase& module, const std::filesystem::path& folder) {
  const ModelFiles files(folder);
  const auto matches = match_all(module, files);
  std::for_each(matches.begin(), matches.end(), check_ready);
  const at::NoGradGuard no_grad;
  std::for_each(matches.begin(), matches.end(), fill);
}

}  // namespace tessera::checkpoint
