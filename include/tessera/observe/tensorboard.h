#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/observe/metrics.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// Values by TensorBoard tag.
using Scalars = std::vector<std::pair<std::string, double>>;

/// The metrics of a step under torchtitan's tags: loss_metrics/global_avg_loss, grad_norm, lr,
/// throughput(tps) per rank, tflops, mfu(%), time_metrics/end_to_end(s), data_loading(s) and
/// data_loading(%), memory/max_active and max_reserved in GiB and %, validation_metrics/loss.
/// Additional tags are memory/max_resident on a CPU, and loss_scale with loss scaling. Unknown
/// values are omitted. `device_type` is "cpu" or "cuda".
Scalars titan_scalars(const StepMetrics& metrics, int world_size, const std::string& device_type);

/// Writes values to a TensorBoard event file: a TFRecord file of Event messages (TensorFlow's
/// event.proto). For one rank and one thread.
class TensorBoardWriter {
 public:
  /// Creates the folder if it is missing, and a new event file in it. A resumed run repeats the
  /// steps from `first_step` on, so TensorBoard ignores older files' values from this step on.
  /// Throws Error if the file can't be written.
  explicit TensorBoardWriter(const std::filesystem::path& folder, std::int64_t first_step = 1);
  /// Writes the values of a step as fp32, and flushes the file. Throws Error if the file can't be
  /// written.
  void write(std::int64_t step, const Scalars& scalars);

  const std::filesystem::path& path() const { return path_; }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  void write_event(const std::string& event);

  std::filesystem::path path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace tessera::observe
TESSERA_API_END
