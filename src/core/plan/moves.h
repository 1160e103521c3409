#pragma once

#include <vector>

#include "place.h"
#include "tessera/core/redistribute_plan.h"

namespace tessera::plan {

/// Adds to `out` each step of one kind that may be taken from `place`. One file a move; `bytes` is
/// left to the caller. A new move is its file and a line in kMoves.
using Move = void (*)(const Place& place, std::vector<Step>& out);

void slice(const Place& place, std::vector<Step>& out);
void make_partial(const Place& place, std::vector<Step>& out);
void reduce_scatter(const Place& place, std::vector<Step>& out);
void all_reduce(const Place& place, std::vector<Step>& out);
void all_to_all(const Place& place, std::vector<Step>& out);
void all_gather(const Place& place, std::vector<Step>& out);

inline constexpr Move kMoves[] = {slice,      make_partial, reduce_scatter,
                                  all_reduce, all_to_all,   all_gather};

}  // namespace tessera::plan
