#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

namespace tessera::comm {

/// A thread that runs tasks in the order in which they come. It begins with the first.
class TaskThread {
 public:
  TaskThread() = default;
  TaskThread(const TaskThread&) = delete;
  TaskThread& operator=(const TaskThread&) = delete;
  /// Waits for the tasks, unless they were left behind.
  ~TaskThread();

  /// The result tells when the task has ended, and has its exception. What the task holds is freed
  /// before.
  std::shared_future<void> add(std::function<void()> task);
  /// A task may be stuck: the destructor waits for none. Thread safe.
  void leave_behind();

 private:
  struct Task {
    std::function<void()> run;
    std::promise<void> done{};
  };
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Task> tasks;
    bool ends = false;
    bool left_behind = false;
  };

  static void work(Queue& queue);

  std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  std::thread thread_;
};

}  // namespace tessera::comm
