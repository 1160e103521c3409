// Structs that a RankPlan contains: the estimated time of a step, and the kind of the rank.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::planning {

/// A time interval of a step, in seconds from the step's begin.
struct Span {
  /// The row of the interval in a time chart: the mesh dimension of a collective, or for the
  /// compute stream "operators" or "waiting".
  std::string row;
  std::string what;  ///< phase of the operators, name of the collective, or reason of the wait
  double begin = 0, end = 0;
};

/// The calls of one operator in a step, on all streams: number of calls, bytes, FLOPs and time.
struct OperatorUse {
  std::int64_t calls = 0;
  double bytes = 0;  ///< bytes that the operator's tensors read and write
  double flops = 0;  ///< FLOPs of matrix products; 0 for other operators
  double seconds = 0;
};

/// The time of a step, in seconds.
struct StepTime {
  double total = 0;
  double compute = 0;  ///< time of operators on the compute stream, without waiting
  /// How long the compute stream waits for collectives, by mesh dimension.
  std::map<std::string, double> exposed;
  std::map<std::string, double> communication;  ///< time of all collectives, by mesh dimension
  double flops = 0;         ///< FLOPs of all matrix products, including recomputation
  std::vector<Span> spans;  ///< the intervals of the time chart
  std::map<std::string, OperatorUse> operators{};  ///< uses of each operator, by name: "aten::mm"
};

/// Ranks that all have tensors of the same sizes. One rank of each RankKind is planned.
struct RankKind {
  int first = 0;           ///< the first rank of this RankKind
  int last = 0;            ///< the last rank of this RankKind
  std::int64_t count = 0;  ///< the number of ranks of this RankKind
};

}  // namespace tessera::planning
TESSERA_API_END
