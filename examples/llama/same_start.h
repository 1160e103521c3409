// What the ranks of a job must have alike before they compute: else they would compute something
// else, without a sign.

#pragma once

#include <map>
#include <string>
#include <vector>

#include "examples/llama/generate/sampling.h"
#include "examples/llama/models.h"

namespace llama {

/// A group of all ranks in the hosts' memory, for what they compare before the first step.
/// Collective at the first call.
tessera::comm::CommunicatorPtr start_group(tessera::comm::World& world);

/// Throws Error on every rank where they have other options, as training::check_same_options(), or
/// another config.json, whose first key that differs is named. To be called before anything else
/// that is collective over `world`. Collective.
void check_same_start(tessera::comm::World& world, std::map<std::string, std::string> options,
                      const Config& config);

/// Throws Error on every rank where one has other texts than rank 0. Collective.
void check_same_texts(tessera::comm::World& world, const std::vector<Tokens>& texts);

}  // namespace llama
