#pragma once

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::detail {

/// A private base class of classes whose objects can be neither copied nor moved.
class NoCopy {
 public:
  NoCopy(const NoCopy&) = delete;
  NoCopy& operator=(const NoCopy&) = delete;

 protected:
  NoCopy() = default;
  ~NoCopy() = default;
};

}  // namespace tessera::detail
TESSERA_API_END
