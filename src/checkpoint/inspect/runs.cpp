// All ranks use what rank 0 reads from a folder: on a network file system the others may still see
// an older state.

#include "tessera/checkpoint/runs.h"

#include <c10/core/Device.h>
#include <fmt/format.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "all_ranks.h"
#include "inspect/step_blocks.h"
#include "step/manifest.h"
#include "step/step_folder.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/find_step.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/rank_threads.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// What `look` returns on rank 0.
std::string text_of_first_rank(comm::World& world, const std::function<std::string()>& look) {
  std::string text;
  run_or_fail_on_all(world, [&] {
    if (world.rank() == 0) {
      text = look();
    }
  });
  return comm::broadcast_text(*all_ranks(world), c10::Device(world.options().device), 0, text);
}

/// nullopt for a step that is not there or not valid.
std::optional<std::string> run_of_whole_step(const fs::path& folder) {
  try {
    comm::note_progress(flight::Work::kReading);
    return lacks_manifest(folder) ? std::nullopt : std::optional(read_manifest(folder).run_id);
  } catch (const Error&) {
    return std::nullopt;
  }
}

void check_one_run(const fs::path& dir, const fs::path& step, const std::string& run_id) {
  for (const auto& [number, folder] : steps_in(dir)) {
    const std::optional<std::string> other = run_of_whole_step(folder);
    TESSERA_CHECK(!other || *other == run_id, "'", dir.string(),
                  "' has steps of two runs: ", step.filename().string(), " of ", quoted_run(run_id),
                  ", ", folder.filename().string(), " of ", other ? quoted_run(*other) : "",
                  ": move those of one of them away");
  }
}

/// The step that `look` finds on rank 0.
std::optional<std::int64_t> step_of_first_rank(
    comm::World& world, const std::function<std::optional<std::int64_t>()>& look) {
  std::int64_t found = -1;
  run_or_fail_on_all(world, [&] {
    if (world.rank() == 0) {
      found = look().value_or(-1);
    }
  });
  const std::int64_t step =
      comm::gather_values(*all_ranks(world), c10::Device(world.options().device), {found})[0][0];
  return step < 0 ? std::nullopt : std::optional(step);
}

}  // namespace

std::string new_run_id(comm::World& world) {
  return text_of_first_rank(world, [] {
    std::random_device random;
    return fmt::format("{:08x}{:08x}", random(), random());
  });
}

std::string run_of_step(comm::World& world, const fs::path& dir, std::int64_t step) {
  return text_of_first_rank(world, [&] {
    const fs::path folder = dir / step_folder_name(step);
    std::string run_id = manifest_in(find_step(folder)).run_id;
    check_one_run(dir, folder, run_id);
    return run_id;
  });
}

std::optional<std::string> unfinished_run(comm::World& world, const fs::path& dir) {
  // A run_id may be empty.
  const std::string found = text_of_first_rank(world, [&] {
    for (const auto& [step, folder] : steps_in(dir)) {
      const std::optional<std::string> marker = marker_of(folder);
      if (marker && is_run_id(*marker) && lacks_manifest(folder)) {
        return "=" + *marker;
      }
    }
    return std::string();
  });
  return found.empty() ? std::nullopt : std::optional(found.substr(1));
}

std::optional<std::int64_t> newest_step(comm::World& world, const fs::path& dir,
                                        std::optional<std::int64_t> before) {
  return step_of_first_rank(world, [&] { return newest_step_in(dir, before); });
}

std::optional<std::int64_t> last_step(comm::World& world, const fs::path& dir) {
  return step_of_first_rank(world, [&dir] { return last_step_in(dir); });
}

std::vector<std::int64_t> steps_to_withdraw(comm::World& world, const fs::path& dir,
                                            std::int64_t after, const std::string& run_id) {
  nlohmann::json steps;
  run_or_fail_on_all(world, [&] {
    if (world.rank() == 0) {
      steps = steps_to_withdraw_in(dir, after, run_id);
    }
  });
  const c10::Device device(world.options().device);
  return nlohmann::json::parse(comm::broadcast_text(*all_ranks(world), device, 0, steps.dump()));
}

void withdraw_step(const fs::path& dir, std::int64_t step, const std::string& run_id) {
  StepFolder(dir, step, run_id).withdraw();
}

}  // namespace tessera::checkpoint
