#include "tessera/checkpoint/find_step.h"

#include "step/manifest.h"
#include "step/shards_of_others.h"
#include "step/step_folder.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {

std::filesystem::path find_step(const std::filesystem::path& path) {
  std::error_code error;
  if (std::filesystem::exists(path / kManifestFile, error) || has_shards_of_others(path)) {
    return path;
  }
  refuse_torch_checkpoint(path);
  const auto step = newest_step_in(path);
  TESSERA_CHECK(step, "there is no checkpoint in '", path.string(),
                "': give a folder with a step that was saved whole, which has a ", kManifestFile);
  return path / step_folder_name(*step);
}

}  // namespace tessera::checkpoint
