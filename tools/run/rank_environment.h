#pragma once

#include <string>
#include <vector>

#include "options.h"
#include "rendezvous.h"

namespace tessera::run {

/// A random word that the ranks of one job share, so that a stranger's connection is told apart.
/// That of the environment where it is set; empty for several nodes, which have no common source.
std::string job_token(const Options& options);

/// The environment of a rank, as "NAME=value": this process's own with the job's variables set.
/// Rank 0 also gets the number of its store's listening descriptor.
std::vector<std::string> rank_environment(const Options& options, const Rendezvous& rendezvous,
                                          const std::string& token, int local_rank);

}  // namespace tessera::run
