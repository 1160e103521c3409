#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tessera/comm/trace.h"
#include "tessera/comm/world.h"
#include "tessera/export.h"
#include "tessera/observe/module_watch.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// What a rank did in some steps, as a Chrome trace: JSON that chrome://tracing and Perfetto read.
/// Each rank is a process of it. On the threads are the steps, the program's scopes, each module's
/// forward and backward by FQN, and each collective (category "collective": mesh_dimension, bytes,
/// purpose, exposed_us as of comm::CollectiveCall, step) with the wait for it; beside them, for how
/// long each collective was under way. With CUDA these are the times at which the host issued the
/// work. Outside of the steps that are traced nothing is recorded.
///
///   observe::ModuleWatch watch(*model);
///   observe::StepTrace trace(world);
///   watch.add(trace);
///   {
///     const observe::ModuleWatch::Scope scope(watch);
///     trace.begin_step(2);
///     train_step();
///     trace.end_step();
///   }
///   trace.write("trace.json", "dp=0, tp=1");
class StepTrace final : public ActivityListener {
 public:
  explicit StepTrace(comm::WorldPtr world);

  void begin_step(std::int64_t step);
  void end_step();
  /// Brings the traces of all ranks to rank 0, which writes the file, and drops them. `place`: this
  /// rank's description. Collective over the world; throws Error where the file can't be written.
  /// Ranks of several hosts are shown by those hosts' clocks.
  void write(const std::filesystem::path& path, const std::string& place);

  void entered(Activity activity, const std::string& name) override;
  void left() override;

 private:
  using Clock = comm::CollectiveCall::Clock;
  struct Span {
    std::string name;
    const char* category;
    std::thread::id thread;
    Clock::time_point began, ended;
  };
  struct Call {
    comm::CollectiveCall call;
    std::int64_t step;
  };

  void open(std::string name, const char* category);
  std::string events(std::chrono::nanoseconds origin, const std::string& place) const;

  comm::WorldPtr world_;
  std::vector<Span> spans_;
  std::vector<std::size_t> open_;               ///< spans that have not ended, the innermost last
  std::optional<comm::CallRecorder> recorder_;  ///< of the step under way
  std::int64_t step_ = 0;
  std::vector<Call> calls_;
};

}  // namespace tessera::observe
TESSERA_API_END
