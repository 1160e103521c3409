#pragma once

#include <memory>
#include <vector>

#include "communication.h"

namespace tessera::fsdp {

class Unit;

/// What the units of one model share: the order in which they ran forward, from which backward
/// prefetches, and what is to be done once backward ends.
class Context : public std::enable_shared_from_this<Context> {
 public:
  /// The units in the order of the model's modules, the root first.
  explicit Context(const std::vector<std::shared_ptr<Unit>>& units);

  /// The root's forward begins: prepares all units. What an iteration that never came to its
  /// backward left gathered is freed, since the shards may have changed.
  void begin_forward();
  /// The root's forward has ended: units of several modules, of which not all ran, end theirs.
  /// Throws Error on all ranks if they have not gathered the same units.
  void end_forward();
  /// And no backward will come: frees what is still gathered.
  void end_iteration();
  /// Whether a forward has begun for which no backward has ended.
  bool iteration_open() const { return iteration_open_; }
  /// `unit` has run forward; backward may come to it for as long as somebody holds `token`.
  void ran_forward(Unit& unit, const std::shared_ptr<void>& token);

  /// Backward has come to `unit`.
  void enter_backward();
  /// The unit whose forward ran before that of `unit`, or nullptr; forgets what ran from then on.
  std::shared_ptr<Unit> ran_before(const Unit& unit);

 private:
  struct Ran {
    Unit* unit;
    std::weak_ptr<void> token;
  };

  void await_update();
  void agree_on_pieces();
  void end_backward();
  void end_micro_batch();
  void close_iteration();
  template <class Act>
  void for_each_group(Act&& act) const;
  void agree_on_gathers();
  void agree_on_gradients();
  void agree_on_use();
  bool is_last_backward() const;
  Communication& communication() const;
  std::vector<std::shared_ptr<Unit>> units() const;

  std::vector<std::weak_ptr<Unit>> units_;
  std::vector<Ran> forward_order_;
  bool in_backward_ = false;
  bool iteration_open_ = false;
  /// Pieces may be left from an earlier micro-batch of the same step.
  bool step_open_ = false;
};

}  // namespace tessera::fsdp
