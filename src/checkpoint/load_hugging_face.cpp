// load_hugging_face() has three passes: match parameters with the tensors in the files, and compare
// sizes and types; check that the parameters can be written; fill the parameters. The first two
// passes change nothing. Filling begins only after all ranks have finished the first two passes.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "format.h"
#include "model_files.h"
#include "parameters.h"
#include "ranks.h"
#include "stored_step.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/comm/trace.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/nn/fqn_pattern.h"
#include "tessera/nn/module.h"

namespace tessera::checkpoint {
namespace {

/// A tensor of a file, and the name of the tensor in the file.
struct FileTensor {
  const SafetensorsFile* file = nullptr;
  std::string name;
};

using NamePair = std::pair<std::string, std::string>;

std::string text_of(const NamePair& pair) {
  return "{\"" + pair.first + "\", \"" + pair.second + "\"}";
}

/// The pairs of names of one load (HuggingFaceOptions::names). Each pair must match a tensor.
class Renaming {
 public:
  explicit Renaming(const HuggingFaceOptions& options)
      : pairs_(options.names), used_(options.names.size()) {}

  /// The name that the model has for a tensor; "" if the tensor is to be skipped.
  std::string name_of(const std::string& tensor) {
    std::optional<std::size_t> taken;
    std::string name = tensor;
    for (std::size_t i = 0; i < pairs_.size(); ++i) {
      const auto renamed = nn::detail::renamed_fqn(pairs_[i].first, pairs_[i].second, tensor);
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
                    files.folder().string(), "', beginning with '",
                    files.tensors().empty() ? "" : files.tensors().begin()->first,
                    "'; correct or remove it");
    }
  }

 private:
  const std::vector<NamePair>& pairs_;
  std::vector<bool> used_;
};

/// The tensors in the files under the names of the model (see HuggingFaceOptions::names). Throws
/// Error for pairs that contradict each other or match nothing.
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

/// A parameter, and the file tensor that fills the parameter or a part of it. For a tied parameter,
/// `stored` belongs to the name under which the files have the parameter.
struct Match {
  nn::SlotPtr slot;
  StoredTensor stored;
  FileTensor in_file;
  std::vector<Match> copies;  ///< tensors under other names of a tied parameter, with equal values
};

/// Whether a tensor is a rotary buffer that older Llama exports contain. The model computes this
/// buffer itself.
bool is_computed(const std::string& name) {
  return name.ends_with("rotary_emb.inv_freq");
}

/// Compares a parameter with the file. Mismatches are recorded instead of thrown, so that one
/// message can list all of them.
void compare(const Match& match, Mismatch& mismatch) {
  const auto& entry = match.in_file.file->entry(match.in_file.name);
  const c10::ScalarType dtype = match.slot->persistent().scalar_type();
  if (match.stored.sizes != entry.sizes) {
    mismatch.different.push_back(fmt::format("{} (file [{}], model [{}])", match.stored.name,
                                             fmt::join(entry.sizes, ", "),
                                             fmt::join(match.stored.sizes, ", ")));
  } else if (!is_convertible_type(entry.dtype, dtype)) {
    mismatch.different.push_back(fmt::format("{} (file {}, model {})", match.stored.name,
                                             entry.dtype_name, c10::toString(dtype)));
  }
}

/// Advice for names that do not fit. If the names differ only by a prefix (the "module." of a
/// wrapper in a state_dict), the advice is the pair of names that removes the prefix.
std::string advice(const Mismatch& mismatch, bool nothing_fits, const HuggingFaceOptions& options) {
  if (!options.names.empty()) {
    return ": correct the pairs of names";
  }
  const auto starts_for = [](const std::string& longer, const std::string& shorter) {
    return longer.ends_with("." + shorter) ? longer.substr(0, longer.size() - shorter.size())
                                           : std::string();
  };
  for (const std::string& here : mismatch.missing) {
    for (const std::string& there : mismatch.unexpected) {
      if (const std::string prefix = starts_for(there, here); !prefix.empty()) {
        return fmt::format(
            ": the names in the files begin with '{}': pass HuggingFaceOptions{{.names = "
            "{{{{\"{}**\", \"**\"}}}}}}",
            prefix, prefix);
      }
      if (const std::string prefix = starts_for(here, there); !prefix.empty()) {
        return fmt::format(
            ": the names of the model begin with '{}': pass HuggingFaceOptions{{.names = "
            "{{{{\"**\", \"{}**\"}}}}}}",
            prefix, prefix);
      }
    }
  }
  return nothing_fits ? ": no name in the files is a name of the model: pass pairs of names in "
                        "HuggingFaceOptions::names, or the folder of this model"
                      : ": use the config.json that belongs to these weights";
}

std::vector<Match> match_all(const nn::ModuleBase& module, const ModelFiles& files,
                             const HuggingFaceOptions& options) {
  const std::map<std::string, FileTensor> in_files = renamed_tensors(files, options);
  std::vector<Match> matches;
  Mismatch mismatch;
  std::set<std::string> known;
  for (const auto& [slot, names, is_buffer] : model_slots(module)) {
    // The tensors that store the parameter, one or several for each name of the parameter.
    std::vector<std::vector<StoredTensor>> by_name;
    for (const std::string& name : names) {
      by_name.push_back(stored_tensors(name, *slot));
    }
    for (std::size_t i = 0; i < by_name.front().size(); ++i) {
      std::vector<Match> found;
      for (const std::vector<StoredTensor>& tensors : by_name) {
        if (known.insert(tensors[i].name).second && in_files.contains(tensors[i].name)) {
          found.push_back({slot, tensors[i], in_files.at(tensors[i].name), {}});
          compare(found.back(), mismatch);
        }
      }
      if (!found.empty()) {
        matches.push_back(found.front());
        matches.back().copies.assign(found.begin() + 1, found.end());
        // A missing buffer is allowed, because some programs do not save buffers.
      } else if (!is_buffer) {
        mismatch.missing.push_back(by_name.front()[i].name);
      }
    }
  }
  for (const auto& [name, in_file] : in_files) {
    if (!known.contains(name) && !is_computed(name)) {
      mismatch.unexpected.push_back(name == in_file.name ? name
                                                         : name + " (" + in_file.name + " there)");
    }
  }
  TESSERA_CHECK(mismatch.empty(), "the weights in '", files.folder().string(),
                "' do not fit the model", listed("missing", mismatch.missing),
                listed("unexpected", mismatch.unexpected), listed("different", mismatch.different),
                advice(mismatch, matches.empty(), options));
  return matches;
}

/// Throws Error if the files have two different tensors for a tied parameter. Each rank compares
/// its local part.
void check_copies(const Match& match) {
  const at::Tensor& tensor = match.slot->persistent();
  const auto read = [&](const Match& from, auto offset, auto sizes) {
    return from.in_file.file->read(from.in_file.name, offset, sizes).to(tensor.scalar_type());
  };
  const auto check_piece = [&](auto offset, auto sizes) {
    for (const Match& copy : match.copies) {
      TESSERA_CHECK(
          at::equal(read(match, offset, sizes), read(copy, offset, sizes)), "'", match.stored.name,
          "' and '", copy.stored.name, "' have different values in '",
          match.in_file.file->path().parent_path().string(),
          "', but are one parameter of the model: make the model with two (of a "
          "config.json, \"tie_word_embeddings\": false), or remove the tensor that is not "
          "meant");
    }
  };
  const std::int64_t most = kMostPieceBytes / static_cast<std::int64_t>(sizeof(double));
  for (const auto& box : owned_blocks(tensor)) {
    match.stored.visit(box.global_offset, local_block(local_tensor(tensor), box),
                       [&](std::span<const std::int64_t> offset, const at::Tensor& part) {
                         for_each_piece(part.sizes(), most, [&](auto from, auto sizes) {
                           check_piece(moved(offset, from), sizes);
                         });
                       });
  }
}

/// Fills the parameters. Reads only the blocks of this rank, in the order of the files.
void fill(std::vector<Match> matches) {
  std::ranges::stable_sort(matches, {}, [](const Match& match) {
    const auto& [file, name] = match.in_file;
    return std::pair(file->path(), file->entry(name).offset);
  });
  PieceReads reads;
  for (const Match& match : matches) {
    const auto& tensor = match.slot->persistent();
    const auto& local = local_tensor(tensor);
    for (const auto& box : owned_blocks(tensor)) {
      match.stored.visit(box.global_offset, local_block(local, box),
                         [&](std::span<const std::int64_t> offset, const at::Tensor& part) {
                           reads.add(*match.in_file.file, match.in_file.name, offset, part);
                         });
    }
  }
  reads.run();
}

/// Runs one pass of a load, either on all ranks or on this rank alone.
using RunStep = std::function<void(const std::function<void()>& step)>;

void load(nn::ModuleBase& module, const std::filesystem::path& folder,
          const HuggingFaceOptions& options, const RunStep& run) {
  // Gradient recording is off, because filling a leaf that requires a gradient would throw
  // otherwise.
  const at::NoGradGuard no_grad;
  std::optional<ModelFiles> files;
  std::vector<Match> matches;
  run([&] {
    files.emplace(folder);
    matches = match_all(module, *files, options);
    for (const Match& match : matches) {
      check_fillable(*match.slot, match.stored.name);
      check_copies(match);
    }
  });
  const auto set_initialized = [&](bool filled) {
    for (const Match& match : matches) {
      match.slot->set_initialized(filled);
    }
  };
  try {
    run([&] { fill(matches); });
  } catch (...) {
    set_initialized(false);
    throw;
  }
  set_initialized(true);
}

}  // namespace

void load_hugging_face(nn::ModuleBase& module, comm::World& world,
                       const std::filesystem::path& folder, const HuggingFaceOptions& options) {
  const comm::CallerScope caller("load_hugging_face");
  load(module, folder, options,
       [&](const std::function<void()>& step) { run_or_fail_on_all(world, step); });
}

void load_hugging_face(nn::ModuleBase& module, const std::filesystem::path& folder,
                       const HuggingFaceOptions& options) {
  load(module, folder, options, [](const std::function<void()>& step) { step(); });
}

}  // namespace tessera::checkpoint
