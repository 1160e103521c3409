#include "hierarchy/task_thread.h"

#include <pthread.h>

#include <utility>

#include "tessera/comm/detail/thread_warnings.h"

namespace tessera::comm {

TaskThread::~TaskThread() {
  if (!thread_.joinable()) {
    return;
  }
  std::unique_lock lock(queue_->mutex);
  queue_->ends = true;
  queue_->changed.notify_all();
  const bool left_behind = queue_->left_behind;
  lock.unlock();
  left_behind ? thread_.detach() : thread_.join();
}

std::shared_future<void> TaskThread::add(std::function<void()> task) {
  if (!thread_.joinable()) {
    thread_ = std::thread([queue = queue_] { work(*queue); });
  }
  const std::lock_guard lock(queue_->mutex);
  Task& added = queue_->tasks.emplace_back(Task{std::move(task)});
  queue_->changed.notify_all();
  return added.done.get_future().share();
}

void TaskThread::leave_behind() {
  const std::lock_guard lock(queue_->mutex);
  queue_->left_behind = true;
}

void TaskThread::work(Queue& queue) {
  pthread_setname_np(pthread_self(), "tessera-phases");
  take_warnings_of_thread();
  std::unique_lock lock(queue.mutex);
  while (true) {
    queue.changed.wait(lock, [&] { return queue.ends || !queue.tasks.empty(); });
    if (queue.tasks.empty()) {
      return;
    }
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      task.run();
    } catch (...) {
      error = std::current_exception();
    }
    task.run = nullptr;
    error == nullptr ? task.done.set_value() : task.done.set_exception(error);
    lock.lock();
  }
}

}  // namespace tessera::comm
