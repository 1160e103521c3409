#pragma once

#include <string>

#include "tessera/core/detail/flight_record.h"

namespace tessera::comm {

/// Writes `folder`/world-W.rank-R.txt: what the rank did last, and `stacks`. And the record itself
/// beside it, where `tessera-run --explain` reads it, unless the file is there and is the record's
/// own memory. Makes the folder. What cannot be written is left out: a job that hangs has worse to
/// report.
void write_dump(const std::string& folder, int world, const flight::Record& record,
                const std::string& stacks);

/// What the device's library recorded, as PyTorch's torchfrtrace reads it.
std::string device_record_path(const std::string& folder, int rank);
void write_device_record(const std::string& folder, int rank, const std::string& record);

}  // namespace tessera::comm
