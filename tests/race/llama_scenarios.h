#pragma once

#include <vector>

#include "race/scenarios.h"

namespace tessera::race {

/// Trainings of models like the trainer's: tensor parallel, recomputed, with adapters, by Muon,
/// with loss scaling, and with split sequences.
std::vector<Scenario> llama_scenarios();

}  // namespace tessera::race
