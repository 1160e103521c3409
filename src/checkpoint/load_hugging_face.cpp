// load_hugging_face() matches parameters with tensors in files, checks that the parameters can be
// written, and then fills the parameters. Filling begins only after all ranks have passed the
// checks.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <system_error>

#include "model_folder.h"
#include "parameters.h"
#include "ranks.h"
#include "stored_step.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/comm/detail/recording.h"
#include "tessera/comm/world.h"
#include "tessera/core/detail/strict_json.h"
#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::checkpoint {
namespace {

// A model folder can come from an untrusted source, such as a download, so all entries of the
// folder's model.safetensors.index.json are checked against the files.

using nlohmann::json;
/// Maps each tensor's name to the name of the shard file that stores the tensor.
using WeightMap = std::map<std::string, std::string>;

/// The largest accepted size of an index file, far above the size of any real index file.
constexpr std::uint64_t kMaxIndexBytes = 100'000'000;

void check_shard_name(const std::string& name) {
  const bool path = name.empty() || name == "." || name.find("..") != std::string::npos ||
                    name.find_first_of("/\\") != std::string::npos;
  TESSERA_CHECK(!path && !has_control_character(name), "the shard name ", ascii(name),
                " is not the name of a file in this folder");
}

/// Reads model.safetensors.index.json. The file's metadata are ignored, because the headers of the
/// shards have all sizes. Each error message contains the path of the file.
WeightMap read_index(const std::filesystem::path& path) {
  const std::string text = files::read_file(path, "an index of weights", kMaxIndexBytes);
  try {
    const json root = tessera::detail::parse_strict_json(text);
    const auto map = root.find("weight_map");
    TESSERA_CHECK(map != root.end() && map->is_object(), "it has no JSON object weight_map");
    WeightMap weight_map;
    for (const auto& [tensor, shard] : map->items()) {
      check_tensor_name(tensor);
      TESSERA_CHECK(shard.is_string(), "its weight_map has no file name for ", ascii(tensor));
      check_shard_name(shard.get_ref<const std::string&>());
      weight_map.emplace(tensor, shard.get<std::string>());
    }
    return weight_map;
  } catch (const Error& error) {
    fail("the index '", path.string(), "' is not valid: ", error.what(),
         ": copy or write the model again");
  }
}

/// Throws Error for a broken symbolic link. Incomplete downloads leave such links in the cache.
void check_link(const std::filesystem::path& path) {
  std::error_code error;
  TESSERA_CHECK(
      !std::filesystem::is_symlink(path, error) || std::filesystem::exists(path, error), "'",
      path.string(), "' is a symbolic link to '",
      std::filesystem::read_symlink(path, error).string(),
      "', which does not exist: download the model again (hf download), or correct the link");
}

/// Returns the path of a shard. A symbolic link is followed only from a snapshot in a Hugging Face
/// cache into the blobs of the same model.
std::filesystem::path shard_path(const std::filesystem::path& folder, const std::string& name) {
  auto path = folder / name;
  std::error_code error;
  if (!std::filesystem::is_symlink(path, error)) {
    return path;
  }
  check_link(path);
  const auto target = std::filesystem::canonical(path, error);
  const auto snapshot = std::filesystem::canonical(folder, error);
  // In a Hugging Face cache, a snapshot is a folder of links from
  // models--NAME/snapshots/REVISION/FILE to models--NAME/blobs/HASH.
  const bool cached = !error && snapshot.parent_path().filename() == "snapshots" &&
                      target.parent_path() == snapshot.parent_path().parent_path() / "blobs";
  return cached ? target : path;
}

}  // namespace

ModelFiles::ModelFiles(const std::filesystem::path& folder) : folder_(folder) {
  TESSERA_CHECK(std::filesystem::is_directory(folder), "there is no model folder '",
                folder.string(), "': give a folder with config.json and ", kSingleFile);
  TESSERA_CHECK(!std::filesystem::exists(folder / kAdapterConfig), "the model folder '",
                folder.string(), "' has ", kAdapterConfig,
                "; other programs would load the adapter and its base model instead of the weights "
                "in this folder: pass a folder without an adapter, or move the adapter away");
  for (const char* name : {kSingleFile, kIndexFile}) {
    check_link(folder / name);
  }
  const bool single = std::filesystem::exists(folder / kSingleFile);
  if (!single) {
    refuse_torch_checkpoint(folder);
  }
  TESSERA_CHECK(single || std::filesystem::exists(folder / kIndexFile), "the model folder '",
                folder.string(), "' has neither ", kSingleFile, " nor ", kIndexFile,
                ": give the folder of a Hugging Face model in safetensors format");
  // `transformers` prefers a single file to an index if a folder has both.
  single ? open_single() : open_index();
}

void ModelFiles::open_single() {
  const auto& file = files_.emplace_back(folder_ / kSingleFile);
  for (const auto& [name, entry] : file.tensors()) {
    tensors_.emplace(name, &file);
  }
}

void ModelFiles::open_index() {
  const auto path = folder_ / kIndexFile;
  const WeightMap weight_map = read_index(path);
  std::map<std::string, const SafetensorsFile*> shards;
  for (const auto& [tensor, shard] : weight_map) {
    if (shards.contains(shard)) {
      continue;
    }
    // Links are refused (Symlinks::kRefuse): shard_path() has resolved every permitted link.
    const auto& file = files_.emplace_back(shard_path(folder_, shard), Symlinks::kRefuse);
    shards.emplace(shard, &file);
    // A tensor is read only from the shard to which the index assigns the tensor.
    for (const auto& [name, entry] : file.tensors()) {
      TESSERA_CHECK(weight_map.contains(name), "tensor '", name, "' is in '", file.path().string(),
                    "', but the index '", path.string(),
                    "' does not list it: copy or write the model again");
    }
  }
  for (const auto& [tensor, shard] : weight_map) {
    shards.at(shard)->entry(tensor);
    tensors_.emplace(tensor, shards.at(shard));
  }
}

namespace {

struct FileTensor {
  const SafetensorsFile* file = nullptr;
  std::string name;
};

/// Converts a tensor's name in the files to its name in the model. Returns "" to skip the tensor.
using ModelName = std::function<std::string(const std::string& tensor)>;

/// Returns the files' tensors by their names in the model. Throws Error if a name occurs twice.
std::map<std::string, FileTensor> renamed_tensors(const ModelFiles& files,
                                                  const ModelName& model_name) {
  std::map<std::string, FileTensor> tensors;
  for (const auto& [tensor, file] : files.tensors()) {
    const std::string name = model_name ? model_name(tensor) : tensor;
    if (name.empty()) {
      continue;
    }
    const auto [known, is_new] = tensors.emplace(name, FileTensor{file, tensor});
    TESSERA_CHECK(is_new, "load_hugging_face: model_name gives the tensors '", known->second.name,
                  "' and '", tensor, "' the same name '", name, "'; return different names");
  }
  return tensors;
}

/// A parameter, and a tensor in the files that fills all or a part of it. For a tied parameter,
/// `stored` has the FQN that occurs in the files.
struct Match {
  nn::SlotPtr slot;
  StoredTensor stored;
  FileTensor in_file;
  std::vector<Match> copies;
};

/// Whether a tensor is a rotary-embedding buffer. Older exports of Llama contain this buffer, which
/// the model computes and does not load.
bool is_computed(const std::string& name) {
  return name.ends_with("rotary_emb.inv_freq");
}

/// Compares the sizes and dtypes of a parameter and of the tensor in the file. Mismatches are
/// recorded and not thrown, so that one message can list all mismatches.
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

const char* advice(bool nothing_fits, const ModelName& model_name) {
  if (model_name) {
    return ": correct model_name, the function that maps tensor names in the files to names in the "
           "model";
  }
  return nothing_fits ? ": no tensor name in the files is a name in the model: pass a function "
                        "model_name that maps the names, or the folder of this model"
                      : ": use the config.json that belongs to these weights";
}

std::vector<Match> match_all(const nn::ModuleBase& module, const ModelFiles& files,
                             const ModelName& model_name) {
  const std::map<std::string, FileTensor> in_files = renamed_tensors(files, model_name);
  std::vector<Match> matches;
  Mismatch mismatch;
  std::set<std::string> known;
  for (const auto& [slot, names, is_buffer] : model_slots(module)) {
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
      mismatch.unexpected.push_back(
          name == in_file.name ? name : name + " (" + in_file.name + " in the file)");
    }
  }
  TESSERA_CHECK(mismatch.empty(), "the weights in '", files.folder().string(),
                "' do not fit the model", listed("missing", mismatch.missing),
                listed("unexpected", mismatch.unexpected), listed("different", mismatch.different),
                advice(matches.empty(), model_name));
  return matches;
}

/// Throws Error if the files have two different tensors for a tied parameter. Each rank compares
/// the elements of its own shard.
void check_copies(const Match& match) {
  const at::Tensor& tensor = match.slot->persistent();
  const auto read = [&](const Match& from, auto offset, auto sizes) {
    return from.in_file.file->read(from.in_file.name, offset, sizes).to(tensor.scalar_type());
  };
  const auto check_piece = [&](auto offset, auto sizes) {
    for (const Match& copy : match.copies) {
      TESSERA_CHECK(at::equal(read(match, offset, sizes), read(copy, offset, sizes)), "'",
                    match.stored.name, "' and '", copy.stored.name, "' have different values in '",
                    match.in_file.file->path().parent_path().string(),
                    "', but are one parameter of the model: build the model with two parameters "
                    "(in config.json: \"tie_word_embeddings\": false), or remove the wrong tensor");
    }
  };
  const std::int64_t most = kMostPieceBytes / static_cast<std::int64_t>(sizeof(double));
  match.stored.visit_own(tensor, [&](std::span<const std::int64_t> offset, const at::Tensor& part) {
    for_each_piece(part.sizes(), most,
                   [&](auto from, auto sizes) { check_piece(moved(offset, from), sizes); });
  });
}

/// Fills the parameters. Each rank reads only its own blocks, in the order of the files.
void fill(std::vector<Match> matches) {
  std::ranges::stable_sort(matches, {}, [](const Match& match) {
    const auto& [file, name] = match.in_file;
    return std::pair(file->path(), file->entry(name).offset);
  });
  PieceReads reads;
  for (const Match& match : matches) {
    match.stored.visit_own(match.slot->persistent(),
                           [&](std::span<const std::int64_t> offset, const at::Tensor& part) {
                             reads.add(*match.in_file.file, match.in_file.name, offset, part);
                           });
  }
  reads.run();
}

using RunStep = std::function<void(const std::function<void()>& step)>;

void load(nn::ModuleBase& module, const std::filesystem::path& folder, const ModelName& model_name,
          const RunStep& run) {
  // Gradients are disabled, because libtorch refuses in-place copies to a leaf that requires grad.
  const at::NoGradGuard no_grad;
  std::optional<ModelFiles> files;
  std::vector<Match> matches;
  run([&] {
    files.emplace(folder);
    matches = match_all(module, *files, model_name);
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
                       const std::filesystem::path& folder, const ModelName& model_name) {
  const comm::CallerScope caller("load_hugging_face");
  load(module, folder, model_name,
       [&](const std::function<void()>& step) { run_or_fail_on_all(world, step); });
}

void load_hugging_face(nn::ModuleBase& module, const std::filesystem::path& folder,
                       const ModelName& model_name) {
  load(module, folder, model_name, [](const std::function<void()>& step) { step(); });
}

}  // namespace tessera::checkpoint
