#include "runtime/stream.h"

#include <map>
#include <set>
#include <thread>

#include "record/record.h"
#include "runtime/capture.h"
#include "runtime/device.h"

namespace fake_cuda {
namespace {

struct Streams {
  std::mutex mutex;
  std::set<Stream*> made;
  std::map<int, Stream*> of_device;  ///< default streams
};

Streams& streams() {
  static auto* const once = new Streams;
  return *once;
}

std::int64_t next_id() {
  static std::atomic<std::int64_t> last = 0;
  return ++last;
}

bool is_default(cudaStream_t handle) {
  return handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
}

Stream* default_stream() {
  const std::lock_guard lock(streams().mutex);
  Stream*& stream = streams().of_device[current_device()];
  if (stream == nullptr) {
    stream = new Stream(current_device(), 0);
  }
  return stream;
}

}  // namespace

void Completion::finish() {
  time_ = std::chrono::steady_clock::now();
  finished_ = true;
  finished_.notify_all();
}

Stream::Stream(int device, int priority) : id_(next_id()), device_(device), priority_(priority) {
  const std::lock_guard lock(record().mutex);
  record().streams[id_] = {.device = device, .priority = priority};
}

void Stream::add(Work work, bool may_wait) {
  std::unique_lock lock(mutex_);
  if (!may_wait && !busy_ && queue_.empty()) {
    // Work that other threads submit meanwhile goes to the queue.
    busy_ = true;
    lock.unlock();
    work();
    lock.lock();
    busy_ = false;
  } else {
    queue_.push_back(std::move(work));
    if (!has_thread_) {
      has_thread_ = true;
      std::thread([this] { run(); }).detach();
    }
  }
  changed_.notify_one();
}

void Stream::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !queue_.empty() && !busy_; });
    Work work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    work();
    work = nullptr;  // what it holds may be freed only outside of the lock
    lock.lock();
    busy_ = false;
  }
}

CompletionPtr Stream::mark() {
  auto point = std::make_shared<Completion>();
  submit([point] { point->finish(); });
  return point;
}

void Stream::wait_for(const CompletionPtr& point) {
  if (!point->finished()) {
    submit_waiting([point] { point->wait(); });
  }
}

Stream* find_stream(cudaStream_t handle) {
  if (is_default(handle)) {
    return default_stream();
  }
  auto* const stream = reinterpret_cast<Stream*>(handle);
  const std::lock_guard lock(streams().mutex);
  if (streams().made.contains(stream)) {
    return stream;
  }
  count_violation("a stream that does not exist");
  return nullptr;
}

std::vector<Stream*> all_streams() {
  const std::lock_guard lock(streams().mutex);
  std::vector<Stream*> all(streams().made.begin(), streams().made.end());
  for (const auto& [device, stream] : streams().of_device) {
    all.push_back(stream);
  }
  return all;
}

Stream* make_stream(int priority) {
  use_device();
  auto* const stream = new Stream(current_device(), priority);
  const std::lock_guard lock(streams().mutex);
  streams().made.insert(stream);
  return stream;
}

bool end_stream(cudaStream_t handle) {
  const std::lock_guard lock(streams().mutex);
  return streams().made.erase(reinterpret_cast<Stream*>(handle)) == 1;
}

void enqueue(Stream& stream, std::function<void(Stream&)> issue) {
  if (stream.capture != nullptr) {
    stream.capture->add(stream, std::move(issue));
  } else {
    issue(stream);
  }
}

void wait_for_all_streams() {
  for (Stream* const stream : all_streams()) {
    stream->mark()->wait();
  }
}

}  // namespace fake_cuda
