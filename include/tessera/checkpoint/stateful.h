#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::checkpoint {

/// An object of a program whose state a checkpoint holds: a schedule, a loss scaler. The state is
/// JSON, the same on every rank: rank 0's is saved, and a load sets it on every rank.
class Stateful {
 public:
  virtual ~Stateful() = default;
  virtual nlohmann::json state_dict() const = 0;
  /// Throws for a state that it cannot take; the load then fails on all ranks.
  virtual void load_state_dict(const nlohmann::json& state) = 0;
};

/// Objects by name, for StateDict.
using NamedStateful = std::vector<std::pair<std::string, Stateful*>>;

/// An object with a different state on every rank, as JSON: counts of a rank's data. A save holds
/// each rank's. A load on as many ranks gives each its own. On another number of ranks, rank 0 gets
/// merged() of all, and the others are reset, so that nothing counts twice. A state that a
/// checkpoint does not have is reset on all ranks.
class RankState {
 public:
  virtual ~RankState() = default;
  virtual nlohmann::json state_dict() const = 0;
  virtual void load_state_dict(const nlohmann::json& state) = 0;
  /// One state in place of those of several ranks.
  virtual nlohmann::json merged(const std::vector<nlohmann::json>& of_ranks) const = 0;
  /// Back to the initial state.
  virtual void reset() = 0;
  /// Whether it is saved. A load resets it if not.
  virtual bool persistent() const { return true; }
};

/// Objects by name, for StateDict.
using NamedRankStates = std::vector<std::pair<std::string, RankState*>>;

/// A value of each rank's own. T: what nlohmann::json can hold.
///
///   checkpoint::PerRank<std::int64_t> tokens(0, checkpoint::sum_of<std::int64_t>);
///   tokens.value += batch.numel();
template <class T>
class PerRank final : public RankState {
 public:
  /// The rule by which values of several ranks, in their order, become one.
  using Merge = std::function<T(const std::vector<T>& of_ranks)>;

  PerRank(T initial, Merge merge)
      : value(initial), initial_(std::move(initial)), merge_(std::move(merge)) {}

  nlohmann::json state_dict() const override { return value; }
  void load_state_dict(const nlohmann::json& state) override { value = state.get<T>(); }
  nlohmann::json merged(const std::vector<nlohmann::json>& of_ranks) const override {
    std::vector<T> values;
    for (const nlohmann::json& state : of_ranks) {
      values.push_back(state.get<T>());
    }
    return merge_(values);
  }
  void reset() override { value = initial_; }

  T value;

 private:
  T initial_;
  Merge merge_;
};

/// The rule for counts.
template <class T>
T sum_of(const std::vector<T>& of_ranks) {
  T sum{};
  for (const T& value : of_ranks) {
    sum += value;
  }
  return sum;
}

}  // namespace tessera::checkpoint
TESSERA_API_END
