// Writes metrics to a JSONL file, the console and TensorBoard.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "tessera/export.h"
#include "tessera/observe/metrics.h"
#include "tessera/observe/tensorboard.h"

TESSERA_API_BEGIN
namespace tessera::observe {

/// Fills peak_memory_bytes, peak_active_bytes and memory_capacity_bytes with the memory use since
/// the last call of take_memory_use().
void set_memory(StepMetrics& metrics, const std::string& device_type);

/// Returns a number with thousands separators, independent of the locale: "1,234,567.89".
std::string grouped(double value, int decimals = 0);
/// Returns a number of bytes as text with a unit: "3.4 GiB", "512 B".
std::string bytes_text(double bytes);

/// Returns the metrics of a step as a console line in torchtitan's format. "tps" is tokens per
/// second and rank, as in torchtitan; an unknown "mfu" is N/A.
std::string titan_line(const StepMetrics& metrics, int world_size);

/// Writes metrics to a JSONL file, one flushed line per step. Creates a missing folder. For one
/// thread of one rank. Throws Error if the file can't be written.
class MetricsWriter {
 public:
  /// Opens the JSONL file. Retains the records of an existing file up to step `resumed`. Removes
  /// all records if `resumed` is 0, as in a new run.
  explicit MetricsWriter(const std::filesystem::path& path, std::int64_t resumed = 0);
  /// Appends the metrics of a step as one line.
  void write(const StepMetrics& metrics);

 private:
  std::filesystem::path path_;
  std::ofstream out_;
};

/// Returns the metrics of a step under torchtitan's tags, such as loss_metrics/global_avg_loss.
/// Tessera's own tags are memory/max_resident (CPU) and loss_scale. Memory is in GiB and %,
/// throughput per rank. Unknown values are omitted. `device_type` is "cpu" or "cuda".
std::vector<std::pair<std::string, double>> titan_scalars(const StepMetrics& metrics,
                                                          int world_size,
                                                          const std::string& device_type);

}  // namespace tessera::observe
TESSERA_API_END
