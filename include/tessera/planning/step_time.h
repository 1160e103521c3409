#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// Something that takes time in a step, in seconds from its begin.
struct Span {
  /// "operators" of the compute lane, "waiting" there, or the mesh dimension of a collective.
  std::string row;
  std::string what;  ///< the phase of operators, the cause of waiting, or the collective
  double begin = 0, end = 0;
};

/// What the calls of one operator take in a step, on any lane.
struct OperatorUse {
  std::int64_t calls = 0;
  double bytes = 0;  ///< of its tensors, read and written
  double flops = 0;  ///< for a product, else 0
  double seconds = 0;
};

/// What a step takes, in seconds.
struct StepTime {
  double total = 0;
  double compute = 0;  ///< operators of the compute lane, without what it waits for
  /// What the compute lane waits for, by mesh dimension.
  std::map<std::string, double> exposed;
  std::map<std::string, double> communication;     ///< of all collectives, by mesh dimension
  double flops = 0;                                ///< for all products, those computed again too
  std::vector<Span> spans;                         ///< operators of a phase without a gap are one
  std::map<std::string, OperatorUse> operators{};  ///< by name: "aten::mm"
};

}  // namespace tessera::planning
TESSERA_API_END
