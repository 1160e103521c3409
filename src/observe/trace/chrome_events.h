#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/comm/trace.h"

namespace tessera::observe {

/// The events of one rank in Chrome's trace event format, as text: objects with commas between.
class ChromeEvents {
 public:
  using Times =
      std::pair<std::chrono::steady_clock::time_point, std::chrono::steady_clock::time_point>;

  /// `origin`: when the file's time is 0, by the steady clock.
  ChromeEvents(int rank, std::chrono::nanoseconds origin) : rank_(rank), origin_(origin) {}

  void name_process(const std::string& place);
  void add(const std::string& name, const char* category, std::thread::id thread, Times times);
  void add(const comm::CollectiveCall& call, std::int64_t step);
  const std::string& text() const { return text_; }

 private:
  void put(nlohmann::ordered_json event);
  double microseconds(std::chrono::steady_clock::time_point time) const;
  nlohmann::ordered_json slice(const std::string& name, const char* category,
                               std::thread::id thread, Times times);
  int number_of(std::thread::id thread);
  void add_flight(const comm::CollectiveCall& call, const std::string& name);

  int rank_;
  std::chrono::nanoseconds origin_;
  std::map<std::thread::id, int> threads_;
  int flights_ = 0;
  std::string text_;
};

/// Writes the events of the ranks as a file; does nothing where there are none.
void write_trace(const std::filesystem::path& path, const std::vector<std::string>& events);

}  // namespace tessera::observe
