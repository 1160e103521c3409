// Event files for TensorBoard. The three messages that scalars need are encoded here in Protocol
// Buffers' wire format, and framed as TFRecords.
#include "tessera/observe/tensorboard.h"
#include "tessera/observe/detail/metrics_output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>

#include "tessera/core/detail/files.h"
#include "tessera/core/error.h"

namespace tessera::observe {
namespace {

std::string little_endian(std::uint64_t value, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; ++i) {
    text.push_back(static_cast<char>(value >> (8 * i)));
  }
  return text;
}

std::string varint(std::uint64_t value) {
  std::string text;
  for (; value >= 128; value >>= 7) {
    text.push_back(static_cast<char>(value | 128));
  }
  text.push_back(static_cast<char>(value));
  return text;
}

// The functions ..._field encode a protobuf field: the field number and the wire type (0: varint,
// 1: 8 bytes, 2: length-delimited, 5: 4 bytes), then the value.

std::string integer_field(std::uint64_t number, std::int64_t value) {
  return varint(number << 3) + varint(static_cast<std::uint64_t>(value));
}

std::string double_field(std::uint64_t number, double value) {
  return varint(number << 3 | 1) + little_endian(std::bit_cast<std::uint64_t>(value), 8);
}

std::string float_field(std::uint64_t number, float value) {
  return varint(number << 3 | 5) + little_endian(std::bit_cast<std::uint32_t>(value), 4);
}

std::string bytes_field(std::uint64_t number, std::string_view bytes) {
  return varint(number << 3 | 2) + varint(bytes.size()) + std::string(bytes);
}

/// Encodes an Event message, with the fields wall_time = 1, step = 2, and one of file_version = 3,
/// summary = 5, session_log = 7.
std::string event_of(std::int64_t step, const std::string& what) {
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  return double_field(1, now.count()) + integer_field(2, step) + what;
}

/// Encodes a Summary, a protobuf message. Its repeated field `value` has the field number 1; in
/// `value`, `tag` has the field number 1 and `simple_value` the field number 2.
std::string summary_of(const std::vector<std::pair<std::string, double>>& scalars) {
  std::string summary;
  for (const auto& [tag, value] : scalars) {
    summary += bytes_field(1, bytes_field(1, tag) + float_field(2, static_cast<float>(value)));
  }
  return summary;
}

/// Returns the masked CRC of a TFRecord: the CRC-32C, rotated, plus a constant.
std::string masked_crc(std::string_view bytes) {
  const std::uint32_t crc = detail::crc32c(std::as_bytes(std::span(bytes)));
  return little_endian(std::rotr(crc, 15) + 0xa282ead8U, 4);
}

std::string record_of(const std::string& event) {
  const std::string length = little_endian(event.size(), 8);
  return length + masked_crc(length) + event + masked_crc(event);
}

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "host";
}

/// Returns the path of an event file, named as TensorFlow names event files. TensorBoard reads
/// files in the order of their names, which is chronological.
std::filesystem::path event_file(const std::filesystem::path& folder, int count) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now).count();
  return folder /
         fmt::format("events.out.tfevents.{:010}.{}.{}.{}", seconds, host_name(), getpid(), count);
}

void add_memory(std::vector<std::pair<std::string, double>>& scalars, const std::string& kind,
                std::int64_t bytes, std::int64_t capacity) {
  const auto used = static_cast<double>(bytes);
  scalars.emplace_back("memory/max_" + kind + "(GiB)", used / (1 << 30));
  if (capacity > 0) {
    scalars.emplace_back("memory/max_" + kind + "(%)", 100 * used / static_cast<double>(capacity));
  }
}

}  // namespace

std::vector<std::pair<std::string, double>> titan_scalars(const StepMetrics& metrics,
                                                          int world_size,
                                                          const std::string& device_type) {
  std::vector<std::pair<std::string, double>> scalars{
      {"loss_metrics/global_avg_loss", metrics.loss},
      {"grad_norm", metrics.grad_norm},
      {"lr", metrics.lr},
      {"throughput(tps)", metrics.tokens_per_s / world_size},
      {"tflops", metrics.tflops},
      {"time_metrics/end_to_end(s)", metrics.step_time_s},
      {"time_metrics/data_loading(s)", metrics.data_time_s},
      {"time_metrics/data_loading(%)", 100 * metrics.data_time_s / metrics.step_time_s}};
  const std::int64_t capacity = metrics.memory_capacity_bytes;
  add_memory(scalars, device_type == "cpu" ? "resident" : "reserved", metrics.peak_memory_bytes,
             capacity);
  if (metrics.peak_active_bytes) {
    add_memory(scalars, "active", *metrics.peak_active_bytes, capacity);
  }
  if (metrics.experts) {
    scalars.emplace_back("experts/load_balancing_loss", metrics.experts->load_balancing_loss);
    scalars.emplace_back("experts/z_loss", metrics.experts->z_loss);
    scalars.emplace_back("experts/largest_over_mean", metrics.experts->largest_over_mean);
  }
  const auto add_known = [&](const char* tag, const std::optional<double>& value) {
    if (value) {
      scalars.emplace_back(tag, *value);
    }
  };
  add_known("mfu(%)", metrics.mfu);
  add_known("validation_metrics/loss", metrics.eval_loss);
  add_known("loss_scale", metrics.loss_scale);
  return scalars;
}

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& folder, std::int64_t first_step) {
  files::create_folders(folder);
  // Another writer in this process, or a run in another container, can use the same file name.
  for (int count = 0; file_ == nullptr; ++count) {
    path_ = event_file(folder, count);
    file_.reset(std::fopen(path_.c_str(), "wbx"));
    TESSERA_CHECK(file_ != nullptr || errno == EEXIST, "cannot write the TensorBoard file '",
                  path_.string(), "': ", std::strerror(errno), "; pass a writable folder");
  }
  write_event(event_of(0, bytes_field(3, "brain.Event:2")));
  // A SessionLog with status = 1 (START) makes TensorBoard ignore the values that the file
  // already has for `first_step` and later steps.
  write_event(event_of(first_step, bytes_field(7, integer_field(1, 1))));
}

void TensorBoardWriter::write(std::int64_t step,
                              const std::vector<std::pair<std::string, double>>& scalars) {
  write_event(event_of(step, bytes_field(5, summary_of(scalars))));
}

void TensorBoardWriter::write_event(const std::string& event) {
  const std::string record = record_of(event);
  const bool written = std::fwrite(record.data(), 1, record.size(), file_.get()) == record.size() &&
                       std::fflush(file_.get()) == 0;
  TESSERA_CHECK(written, "writing the TensorBoard file '", path_.string(),
                "' failed: ", std::strerror(errno), "; check that the disk has room");
}

}  // namespace tessera::observe
