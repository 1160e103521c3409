// Runs backward as with CUDA: on another thread, with only the thread-local state that libtorch
// passes on. Each calling thread (for example, a rank) has one backward thread.

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "tessera/internals/detail/backward.h"
#include "tessera/internals/detail/graph.h"
#include "tessera/internals/detail/threads.h"

namespace tessera::testing {
namespace {

using tessera::detail::AnsweringEngine;
using tessera::detail::edge_list;
using tessera::detail::variable_list;

/// A thread that runs backwards, one after another, like autograd's device threads.
class BackwardThread {
 public:
  BackwardThread() = default;
  BackwardThread(const BackwardThread&) = delete;
  BackwardThread& operator=(const BackwardThread&) = delete;
  ~BackwardThread() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void run(std::function<void()> backward) {
    std::unique_lock lock(mutex_);
    backward_ = std::move(backward);
    changed_.notify_all();
    changed_.wait(lock, [this] { return backward_ == nullptr; });
    if (const std::exception_ptr error = std::exchange(error_, nullptr)) {
      std::rethrow_exception(error);
    }
  }

 private:
  void loop() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopped_ || backward_ != nullptr; });
      if (stopped_) {
        return;
      }
      try {
        backward_();
      } catch (...) {
        error_ = std::current_exception();
      }
      backward_ = nullptr;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> backward_;
  std::exception_ptr error_;
  bool stopped_ = false;
  std::thread thread_{[this] { loop(); }};
};

class ThreadedEngine final : public AnsweringEngine {
 public:
  ~ThreadedEngine() override { stop(); }

  variable_list execute(const edge_list& roots, const variable_list& inputs, bool keep_graph,
                        bool create_graph, bool accumulate_grad,
                        const edge_list& outputs) override {
    variable_list gradients;
    const auto run = [&] {
      gradients = AnsweringEngine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad,
                                           outputs);
    };
    // A nested backward runs on the thread of the outer backward.
    if (tessera::detail::backward_id() != -1) {
      run();
      return gradients;
    }
    thread_local BackwardThread thread;
    thread.run([&run, state = tessera::detail::StateOfThread()] {
      const tessera::detail::StateOfThreadScope scope(state);
      run();
    });
    return gradients;
  }

  static Engine& instance() {
    static ThreadedEngine engine;
    return engine;
  }
};

[[maybe_unused]] const bool kInstalled = [] {
  torch::autograd::set_default_engine_stub(&ThreadedEngine::instance);
  return true;
}();

}  // namespace
}  // namespace tessera::testing
