// The reader of what the ranks of a job wrote down.

#pragma once

#include <iosfwd>
#include <string>

namespace tessera::run {

/// Prints which rank left the order of collectives that the ranks have in common, and what each
/// rank did last, from the flight records in `folder`. Throws Error if it holds none.
void explain(const std::string& folder, std::ostream& out);

}  // namespace tessera::run
