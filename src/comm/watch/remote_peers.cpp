#include "watch/remote_peers.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <future>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "tessera/core/detail/flight_report.h"
#include "tessera/internals/detail/c10d.h"

namespace tessera::comm {
namespace {

constexpr std::chrono::seconds kBetweenPolls{1};
constexpr std::chrono::seconds kPatience{1};
constexpr auto kLeft = "left";
constexpr auto kQuestions = "questions";
constexpr auto kWork = "work";

std::string answer_key(std::int64_t question, int rank) {
  return "answer/" + std::to_string(question) + "/" + std::to_string(rank);
}

std::string left_key(std::int64_t number) {
  return "left/" + std::to_string(number);
}

}  // namespace

struct RemotePeers::State {
  detail::StorePtr store;      ///< used only by the thread
  std::int64_t left_read = 0;  ///< used only by the thread

  std::mutex mutex;  ///< protects the members below; not locked during a call of the store
  std::condition_variable changed;
  std::deque<Request> requests;
  std::uint64_t served = 0;
  std::uint64_t requested = 0;
  bool stops = false;
  std::map<int, std::string> left;
  std::int64_t asked = 0;
  std::int64_t work = 0;  ///< number of progress reports
  std::int64_t last_work = 0;
};

RemotePeers::RemotePeers(detail::StorePtr store) : state_(std::make_shared<State>()) {
  state_->store = std::move(store);
  std::thread([state = state_] { serve(state); }).detach();
}

RemotePeers::~RemotePeers() {
  const std::lock_guard lock(state_->mutex);
  state_->stops = true;
  state_->changed.notify_all();
}

void RemotePeers::serve(const std::shared_ptr<State>& state) {
  const detail::QuietLog quiet;
  std::unique_lock lock(state->mutex);
  while (!state->stops) {
    state->changed.wait_for(lock, kBetweenPolls,
                            [&] { return state->stops || !state->requests.empty(); });
    const auto requests = std::exchange(state->requests, {});
    lock.unlock();
    for (const Request& request : requests) {
      try {
        request(*state->store);
      } catch (const std::exception&) {
        // The store's host has ended, and the job with it; the ranks detect that themselves.
      }
    }
    try {
      look(*state);
    } catch (const std::exception&) {
      // The store's host has ended.
    }
    lock.lock();
    state->served += requests.size();
    state->changed.notify_all();
  }
}

void RemotePeers::look(State& state) {
  const std::int64_t asked = state.store->add(kQuestions, 0);
  const std::int64_t work = state.store->add(kWork, 0);
  const std::int64_t left = state.store->add(kLeft, 0);
  std::map<int, std::string> found;
  while (state.left_read < left && state.store->check({left_key(state.left_read + 1)})) {
    const std::string text = state.store->get_to_str(left_key(++state.left_read));
    const std::size_t space = text.find(' ');
    found[std::stoi(text.substr(0, space))] = text.substr(space + 1);
  }
  const std::lock_guard lock(state.mutex);
  state.asked = asked;
  if (std::exchange(state.work, work) != work) {
    state.last_work = flight::now();
  }
  state.left.merge(found);
}

void RemotePeers::request(Request request) {
  std::unique_lock lock(state_->mutex);
  state_->requests.push_back(std::move(request));
  const std::uint64_t number = ++state_->requested;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, kPatience, [&] { return state_->served >= number; });
}

void RemotePeers::tell_left(int rank, const std::string& why) {
  request([=](detail::Store& store) {
    store.set(left_key(store.add(kLeft, 1)), std::to_string(rank) + " " + why);
  });
}

std::string RemotePeers::left(int rank) const {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->left.find(rank);
  return found == state_->left.end() ? "" : found->second;
}

std::int64_t RemotePeers::ask() {
  const auto number = std::make_shared<std::atomic<std::int64_t>>(0);
  request([=](detail::Store& store) { *number = store.add(kQuestions, 1); });
  return *number;
}

std::int64_t RemotePeers::asked() const {
  const std::lock_guard lock(state_->mutex);
  return state_->asked;
}

void RemotePeers::answer(std::int64_t question, int rank, const std::string& text) {
  request([=](detail::Store& store) { store.set(answer_key(question, rank), text); });
}

std::optional<std::string> RemotePeers::answer_of(std::int64_t question, int rank) {
  const auto text = std::make_shared<std::promise<std::string>>();
  std::future<std::string> found = text->get_future();
  request([=](detail::Store& store) {
    const std::string key = answer_key(question, rank);
    text->set_value(store.check({key}) ? store.get_to_str(key) : "");
  });
  if (found.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    return std::nullopt;
  }
  std::string answer = found.get();
  return answer.empty() ? std::nullopt : std::optional(std::move(answer));
}

bool RemotePeers::claim(const std::string& what) {
  const auto others = std::make_shared<std::atomic<std::int64_t>>(0);
  request([=](detail::Store& store) { *others = store.add("claim/" + what, 1) - 1; });
  return *others == 0;
}

void RemotePeers::tell_of_work() {
  request([](detail::Store& store) { store.add(kWork, 1); });
}

std::int64_t RemotePeers::last_work() const {
  const std::lock_guard lock(state_->mutex);
  return state_->last_work;
}

}  // namespace tessera::comm
