#pragma once

#include <memory>
#include <string>
#include <vector>

#include "fsdp/param_group.h"
#include "fsdp/unit.h"
#include "tessera/comm/detail/streams.h"

namespace tessera::fsdp {

/// Streams that only record the calls, one line of log() per call. Examples:
///   "all_gather unit 'a'"   the argument of note()
///   "compute: record 3"     event 3 follows all earlier work in the stream "compute"
///   "all_gather: wait 3"    the stream "all_gather" waits for event 3
///   "enter all_gather"      the stream "all_gather" becomes the current stream
///   "leave"                 the previous stream is the current stream again
class RecordingStreams final : public comm::Streams {
 public:
  struct Event final : comm::StreamEvent {
    int number = 0;
    comm::Lane lane = comm::Lane::kCompute;
  };

  comm::StreamEventPtr record(comm::Lane lane) override {
    auto event = std::make_shared<Event>();
    event->number = ++events_;
    event->lane = lane;
    log_.push_back(std::string(comm::to_string(lane)) + ": record " +
                   std::to_string(event->number));
    return event;
  }
  void wait(comm::Lane lane, const comm::StreamEventPtr& event) override {
    if (event != nullptr) {
      log_.push_back(std::string(comm::to_string(lane)) + ": wait " + number(event));
    }
  }
  void synchronize(const comm::StreamEventPtr& event) override {
    if (event != nullptr) {
      log_.push_back("host: wait " + number(event));
    }
  }
  void note(const std::string& what) override {
    log_.push_back(what);
    notes_.push_back(what);
  }

  const std::vector<std::string>& log() const { return log_; }
  const std::vector<std::string>& notes() const { return notes_; }
  void clear() {
    log_.clear();
    notes_.clear();
  }

 private:
  void enter(comm::Lane lane) override {
    log_.push_back(std::string("enter ") + comm::to_string(lane));
  }
  void leave() override { log_.push_back("leave"); }
  static std::string number(const comm::StreamEventPtr& event) {
    return std::to_string(static_cast<const Event&>(*event).number);
  }

  int events_ = 0;
  std::vector<std::string> log_;
  std::vector<std::string> notes_;
};

/// Makes `root` and, in its first forward, all units below use RecordingStreams.
inline std::shared_ptr<RecordingStreams> record(const nn::ModuleBase& root) {
  auto streams = std::make_shared<RecordingStreams>();
  root.attached<Unit>()->set_comm_context(std::make_shared<CommContext>(streams, at::kCPU));
  return streams;
}

}  // namespace tessera::fsdp
