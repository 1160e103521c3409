#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::checkpoint {

/// An object whose state is saved in checkpoints, for example a schedule or a loss scaler. The
/// state is JSON and equal on every rank: a save stores the state of rank 0, and a load sets this
/// state on every rank.
class Stateful {
 public:
  virtual ~Stateful() = default;
  virtual nlohmann::json state_dict() const = 0;
  /// Sets the state. If the object rejects `state`, it throws, and the load fails on all ranks.
  virtual void load_state_dict(const nlohmann::json& state) = 0;
};

/// Stateful objects by name, for StateDict.
using NamedStateful = std::vector<std::pair<std::string, Stateful*>>;

/// An object whose JSON state differs between ranks, for example counts of a rank's data. A save
/// stores the state of each rank. A load on the same number of ranks restores the state of each
/// rank. On a different number of ranks, rank 0 gets merged() of all states and the other ranks are
/// reset, so that nothing is counted twice. If the checkpoint lacks the object's state, the object
/// is reset on all ranks.
class RankState {
 public:
  virtual ~RankState() = default;
  virtual nlohmann::json state_dict() const = 0;
  virtual void load_state_dict(const nlohmann::json& state) = 0;
  /// Combines the states of several ranks into one state.
  virtual nlohmann::json merged(const std::vector<nlohmann::json>& of_ranks) const = 0;
  /// Resets the object to its initial state.
  virtual void reset() = 0;
  /// Whether checkpoints save the state of the object. A load resets an object that is not
  /// persistent.
  virtual bool persistent() const { return true; }
};

/// RankState objects by name, for StateDict.
using NamedRankStates = std::vector<std::pair<std::string, RankState*>>;

/// A value that differs between ranks and that checkpoints save for each rank. T is a type that
/// nlohmann::json can convert.
///
///   checkpoint::PerRank<std::int64_t> tokens(0, checkpoint::sum_of<std::int64_t>);
///   tokens.value += batch.numel();
template <class T>
class PerRank final : public RankState {
 public:
  /// Merges the values of several ranks, in rank order, into one value.
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

/// The Merge function of PerRank for counts: the sum over the ranks.
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
