// The tensors of a model folder under the names that a model has for them.

#pragma once

#include <map>
#include <string>

#include "hugging_face/model_files.h"
#include "tessera/checkpoint/hugging_face.h"

namespace tessera::checkpoint {

/// A tensor, and what its file calls it.
struct FileTensor {
  const SafetensorsFile* file = nullptr;
  std::string name;
};

/// By the model's names, as HuggingFaceOptions::names says. Throws Error for pairs that contradict
/// each other or match nothing.
std::map<std::string, FileTensor> renamed_tensors(const ModelFiles& files,
                                                  const HuggingFaceOptions& options);

}  // namespace tessera::checkpoint
