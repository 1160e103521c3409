// What the programs use of tessera::models, under their own names.

#pragma once

#include "tessera/models/llama.h"
#include "tessera/models/parallelize.h"
#include "tessera/models/tokenizer.h"
#include "tessera/tessera.hpp"

namespace llama {

using namespace tessera::models;
using Config = LlamaConfig;

}  // namespace llama
