#pragma once

#include <memory>
#include <string>

#include "tessera/core/detail/flight_record.h"
#include "tessera/export.h"

TESSERA_API_FOR_TEST_BEGIN
namespace tessera::comm {

/// The memory of a flight record. The rank that writes it makes it; ranks of the same host map it.
class RecordMemory {
 public:
  /// A file `path`, which stays; or, for "", anonymous memory (memfd) that ends with the last
  /// process that maps it. Throws Error if the file cannot be made.
  static std::shared_ptr<RecordMemory> create(const std::string& path);
  /// A peer's, by its handle(); nullptr if this process cannot reach it.
  static std::shared_ptr<RecordMemory> open(const std::string& handle);

  RecordMemory(const RecordMemory&) = delete;
  RecordMemory& operator=(const RecordMemory&) = delete;
  ~RecordMemory();

  flight::Record& record() const { return *record_; }
  /// For open(), while this object lives.
  const std::string& handle() const { return handle_; }

 private:
  RecordMemory(int fd, flight::Record* record) : fd_(fd), record_(record) {}

  int fd_;
  flight::Record* record_;
  std::string handle_;
};
using RecordPtr = std::shared_ptr<RecordMemory>;

}  // namespace tessera::comm
TESSERA_API_FOR_TEST_END
