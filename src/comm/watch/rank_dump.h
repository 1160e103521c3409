#pragma once

#include <string>

#include "tessera/core/detail/flight_record.h"

namespace tessera::comm {

/// Writes `folder`/world-W.rank-R.txt: the rank's last calls, and `stacks`. Also writes the record
/// beside it, for `tessera-run --explain`, unless the file exists and is the record's own memory.
/// Makes the folder. A file that cannot be written is left out, without an error.
void write_dump(const std::string& folder, int world, const flight::Record& record,
                const std::string& stacks);

/// What the device's library recorded, as PyTorch's torchfrtrace reads it.
std::string device_record_path(const std::string& folder, int rank);
void write_device_record(const std::string& folder, int rank, const std::string& record);

}  // namespace tessera::comm
