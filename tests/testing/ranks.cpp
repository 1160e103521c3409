#include "testing/ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>

namespace tessera::testing {
namespace {

// Tests count traffic, to which TESSERA_DEBUG would add, so the default here is TESSERA_DEBUG=0.
[[maybe_unused]] const int kNoChecks = setenv("TESSERA_DEBUG", "0", /*overwrite=*/0);

struct Failure {
  int rank;
  std::exception_ptr error;
};

class RankThreads {
 public:
  RankThreads(int size, const Body& body, const RanksOptions& options)
      : worlds_(options.make_worlds(size, options.world)), body_(body), running_(size) {
    for (const auto& world : worlds_) {
      threads_.emplace_back([this, world] { run(world); });
    }
    wait(options.deadline);
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

  /// Returns the failures of all ranks in the order of time.
  const std::vector<Failure>& failures() const { return failures_; }

 private:
  void run(const comm::WorldPtr& world) {
    try {
      Rank rank(world);
      body_(rank);
      if (::testing::Test::HasFatalFailure()) {
        world->abort();
      }
    } catch (...) {
      note_failure(world->rank(), std::current_exception());
      world->abort();
    }
    const std::lock_guard lock(mutex_);
    --running_;
    finished_.push_back(world->rank());
    changed_.notify_all();
  }

  void note_failure(int rank, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    failures_.push_back({rank, std::move(error)});
  }

  void wait(std::chrono::seconds deadline) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, deadline, [this] { return running_ == 0; })) {
      report_and_abort(deadline);
    }
  }

  [[noreturn]] void report_and_abort(std::chrono::seconds deadline) const {
    std::fprintf(stderr, "RunRanks: %d of %zu ranks still run after %lld s\n", running_,
                 worlds_.size(), static_cast<long long>(deadline.count()));
    for (const auto& world : worlds_) {
      const bool done = std::ranges::find(finished_, world->rank()) != finished_.end();
      std::fprintf(stderr, "  rank %d: %s", world->rank(), done ? "ended" : "runs, after");
      for (const auto& [key, traffic] : world->traffic().table()) {
        std::fprintf(stderr, " %s/%s x%lld", key.first.c_str(), key.second.c_str(),
                     static_cast<long long>(traffic.calls));
      }
      std::fprintf(stderr, "\n");
    }
    std::abort();
  }

  std::vector<comm::WorldPtr> worlds_;
  const Body& body_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int running_;
  std::vector<int> finished_;
  std::vector<Failure> failures_;
  std::vector<std::thread> threads_;
};

bool is_peer_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const comm::PeerError&) {
    return true;
  } catch (...) {
    return false;
  }
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

void RunRanks(int size, const Body& body, const RanksOptions& options) {
  const RankThreads ranks(size, body, options);
  for (const Failure& failure : ranks.failures()) {
    if (!is_peer_error(failure.error)) {
      std::rethrow_exception(failure.error);
    }
  }
  // After a failed ASSERT on one rank, errors of other ranks are consequences and are not thrown.
  if (!ranks.failures().empty() && !::testing::Test::HasFatalFailure()) {
    std::rethrow_exception(ranks.failures().front().error);
  }
}

void RunOnMesh(const std::vector<std::int64_t>& sizes, const std::vector<std::string>& names,
               const std::function<void(Rank&, const DeviceMesh&)>& body) {
  RunRanks(ranks_of(sizes), [&](Rank& rank) { body(rank, rank.mesh(sizes, names)); });
}

void RunOnMesh(const std::vector<std::int64_t>& sizes, const std::vector<std::string>& names,
               const std::function<void(const DeviceMesh&)>& body) {
  RunOnMesh(sizes, names, [&](Rank&, const DeviceMesh& mesh) { body(mesh); });
}

std::vector<std::string> ErrorsOfRanks(int size, const Body& body, const RanksOptions& options) {
  const RankThreads ranks(size, body, options);
  std::vector<std::string> messages(static_cast<std::size_t>(size));
  for (const Failure& failure : ranks.failures()) {
    messages[static_cast<std::size_t>(failure.rank)] = message_of(failure.error);
  }
  return messages;
}

}  // namespace tessera::testing
