#pragma once

namespace tessera::detail {

/// Whether this process asks (TESSERA_DEBUG) that ranks compare what they make.
bool checks_agreement();

}  // namespace tessera::detail
