#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace tessera::race {

/// What a machine takes for work, in microseconds.
struct Costs {
  double flops = 0;    ///< of matrix products, a microsecond
  double memory = 0;   ///< bytes a microsecond, of other operators
  double latency = 0;  ///< of a collective
  double network = 0;  ///< bytes a microsecond, of what a collective reads or writes

  double product(double count) const { return over(count, flops); }
  double other(double bytes) const { return over(bytes, memory); }
  double collective(double bytes) const { return latency + over(bytes, network); }

 private:
  /// A rate of 0: it takes no time.
  static double over(double amount, double rate) { return rate > 0 ? amount / rate : 0; }
};

/// A moment, and what ends then: the cause of each wait until it.
struct Moment {
  double time = 0;
  std::string cause;
};

/// A stretch of a queue's time.
struct Span {
  std::size_t queue = 0;
  std::string name;
  std::string detail;
  double begin = 0;
  double end = 0;
};

/// When queues of work would do what they are given, if each took its cost, the host were ahead of
/// all of them, and nothing were waited for but events.
class Timeline {
 public:
  explicit Timeline(Costs costs) : costs_(costs) {}

  const Costs& costs() const { return costs_; }
  Moment now(std::size_t queue) const;
  void wait(std::size_t queue, const Moment& moment);
  void run(std::size_t queue, const std::string& name, const std::string& detail,
           double microseconds);

  /// What is exposed: the time that the compute lane (queue 0) waits. From here on.
  void mark() { stalls_.clear(); }
  /// By the cause that it waited for.
  const std::vector<Span>& stalls() const { return stalls_; }

  /// The format of chrome://tracing and Perfetto. `rank`: its process.
  std::string chrome_trace(int rank) const;

 private:
  std::vector<Moment> now_;
  std::vector<Span> spans_;
  std::vector<Span> stalls_;
  Costs costs_;
};

}  // namespace tessera::race
