// --ac auto: chooses activation checkpointing from a plan of the run's memory. The program
// llama_plan makes the plan, because planning replaces the CPU allocator of its process.

#include <ATen/ops/empty.h>
#include <c10/util/ScopeExit.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "examples/llama/start.h"
#include "examples/llama/train/run.h"
#include "tessera/comm/agreement.h"
#include "tessera/observe/metrics.h"

namespace llama {

using namespace tessera;

namespace {

constexpr double kGiB = 1 << 30;

/// A safety factor for memory that llama_plan does not count, such as fragmentation. On one H200,
/// libtorch reserved up to 1.19 times the planned memory.
constexpr double kReservedPerPlanned = 1.2;

/// Returns how many bytes of memory on this rank's device the planned tensors may use.
std::int64_t own_room(const TrainOptions& o) {
  if (o.memory) {
    return static_cast<std::int64_t>(*o.memory * kGiB);
  }
  // libtorch reports the memory of a GPU only after the first allocation.
  const at::Tensor first = at::empty({1}, at::device(c10::Device(o.device)));
  const auto capacity = static_cast<double>(observe::take_memory_use(o.device).capacity_bytes);
  return static_cast<std::int64_t>((capacity - planning::Machine{}.reserved_bytes) /
                                   kReservedPerPlanned);
}

/// Runs a program until the program ends. The program's output goes to the file `log`. Returns the
/// exit code, or 128 if a signal ended the program.
int run_logged(std::vector<std::string> command, const std::string& log) {
  std::vector<char*> arguments;
  for (std::string& argument : command) {
    arguments.push_back(argument.data());
  }
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, log.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC, 0644);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  pid_t child = 0;
  const int failed =
      posix_spawn(&child, command.front().c_str(), &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  TESSERA_CHECK(
      failed == 0, "can't start ", command.front(),
      "; build llama_plan in llama_train's folder: cmake --build BUILD --target llama_plan");
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

/// Returns the line of llama_plan's log with llama_plan's error message; without an error message,
/// returns the last line.
std::string error_in(const std::string& log) {
  std::ifstream in(log);
  std::string last;
  for (std::string line; std::getline(in, line);) {
    if (line.find("llama_plan: ") != std::string::npos) {
      return line;
    }
    last = line.empty() ? last : line;
  }
  return last.empty() ? "the program wrote nothing" : last;
}

/// Returns llama_plan's JSON for this run on devices with `room` bytes. Any value of --gpu will do,
/// because a GPU's speed does not change the memory that a run needs.
nlohmann::json plan_of(const TrainOptions& o, std::int64_t room) {
  std::error_code none;
  const std::filesystem::path temporary = std::filesystem::temp_directory_path(none);
  std::string name = temporary / "llama_train-XXXXXX";
  TESSERA_CHECK(!temporary.empty() && ::mkdtemp(name.data()) != nullptr, "can't create the folder ",
                name, " for the plan of --ac auto; set TMPDIR to a writable folder");
  const std::filesystem::path folder(name);
  const auto remove = c10::make_scope_exit([&folder] {
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
  });
  const std::filesystem::path flags = folder / "run.toml", json = folder / "plan.json",
                              log = folder / "plan.log";
  std::ofstream(flags) << o.resolved;
  const std::filesystem::path program =  // llama_plan is in llama_train's folder
      std::filesystem::read_symlink("/proc/self/exe").replace_filename("llama_plan");
  const int code =
      run_logged({program.string(), "--config-file", flags.string(), "--dp", std::to_string(o.dp),
                  "--ac", "auto", "--memory", number_text(static_cast<double>(room) / kGiB),
                  "--device", o.device, "--gpu", "h100", "--json", json.string()},
                 log);
  TESSERA_CHECK(code == 0, "--ac auto: ", error_in(log), "; pass --ac none, selective or full");
  std::ifstream in(json);
  return nlohmann::json::parse(in);
}

std::string bytes_of(const nlohmann::json& plan, const char* key) {
  return fmt::format("{:.2f} GiB", plan.at(key).get<double>() / 0x1p30);
}

}  // namespace

TrainOptions with_chosen_ac(TrainOptions options, comm::World& world) {
  if (options.ac != "auto") {
    return options;
  }
  const comm::CommunicatorPtr group = start_group(world);
  // All ranks must make the same choice, so the device with the least memory decides.
  std::int64_t room = own_room(options);
  for (const std::string& text : comm::gather_texts(*group, c10::kCPU, std::to_string(room))) {
    room = std::min<std::int64_t>(room, std::stoll(text));
  }
  std::string chosen;
  comm::run_or_fail_together(*group, c10::kCPU, [&] {
    if (world.rank() != 0) {
      return;
    }
    const nlohmann::json plan = plan_of(options, room);
    chosen = plan.at("flags").at("--ac").get<std::string>();
    std::cout << fmt::format("--ac auto: {} (planned memory of a rank: {}, limit: {}{})", chosen,
                             bytes_of(plan, "peak_bytes"), bytes_of(plan, "room_bytes"),
                             plan.at("fits").get<bool>() ? "" : "; no --ac fits")
              << std::endl;
  });
  options.ac = comm::gather_texts(*group, c10::kCPU, chosen).front();
  return options;
}

}  // namespace llama
