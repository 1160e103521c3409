// The outputs of ranks that an option names, in the syntax of torchrun's --redirects and --tee.

#pragma once

#include <map>
#include <set>

#include "settings.h"

namespace tessera::run {

/// Standard output and standard error of the ranks of this node.
class Streams {
 public:
  Streams() = default;
  /// "3" is both outputs of every rank, "0:1,1:2" standard output of local rank 0 and standard
  /// error of local rank 1; 0 is none, 1 output, 2 error. Throws Error for anything else, and for a
  /// local rank that is named twice or is none of this node's `nproc`.
  Streams(const Setting& setting, int nproc);
  /// Both outputs of every rank.
  static Streams all();

  bool has_out(int local_rank) const { return (of(local_rank) & kOut) != 0; }
  bool has_err(int local_rank) const { return (of(local_rank) & kErr) != 0; }
  bool has_any() const;

 private:
  static constexpr int kOut = 1;
  static constexpr int kErr = 2;
  int of(int local_rank) const;

  int every_ = 0;
  std::map<int, int> single_;
};

/// "0,2" as a set of local ranks. Throws Error as Streams does.
std::set<int> local_ranks(const Setting& setting, int nproc);

}  // namespace tessera::run
