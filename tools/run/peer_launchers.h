// The launchers of a job's other nodes, as long as the job runs: one that has failed says so, and
// all end their ranks.

#pragma once

#include <poll.h>

#include <optional>
#include <string>
#include <vector>

#include "process/file_descriptor.h"

namespace tessera::run {

/// This node's name: with several nodes a pid alone does not say where to look.
std::string host_name();

class PeerLaunchers {
 public:
  /// Connected to one another: on node 0 all others, there node 0. None where the launchers of a
  /// job did not meet.
  explicit PeerLaunchers(std::vector<FileDescriptor> sockets);

  /// Adds what poll() is to wait for.
  void add_waits(std::vector<pollfd>& waits) const;
  /// What another launcher says of its failure, or that it is gone; nullopt: none has failed.
  std::optional<std::string> failure();
  /// Tells the others of a failure, of this node or, on node 0, of another.
  void tell_failure(const std::string& text);
  /// Tells them that the ranks of this node have ended well.
  void tell_end();

 private:
  void tell(const std::string& line);

  std::vector<FileDescriptor> sockets_;
};

}  // namespace tessera::run
