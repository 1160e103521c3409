#pragma once

#include "plan/call_plan.h"

namespace tessera::detail {

/// Throws Error for a call that draws its numbers one after another, where data-parallel ranks draw
/// for different rows: they would draw the same. Collective where ranks have rows to compare.
void check_rows_together(const PlannedCall& call);

/// Runs an in-place random operator by the global element: nothing is gathered, and every mesh
/// draws the same numbers. The call's arguments on the stack are replaced by its result. Not
/// collective but where the tensor is a view of one that had to be gathered.
void run_random_inplace(PlannedCall& call);

/// Runs native_dropout by the global element: every mesh drops the same ones. The call's arguments
/// on the stack are replaced by its results. Collective where the tensor is a pending reduction,
/// which is carried out first.
void run_native_dropout(PlannedCall& call);

}  // namespace tessera::detail
