#include "row_kernels.h"

namespace tessera::kernels {

const RowKernelTable& row_kernels() {
  return baseline::kTable;
}

}  // namespace tessera::kernels
