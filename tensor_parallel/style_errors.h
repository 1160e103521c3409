#pragma once

#include "tessera/core/error.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace tessera::tensor_parallel {

/// `style` was asked for a module that it does not fit; `fits` says what it is for.
[[noreturn]] inline void fail_unfit(const ParallelStyle& style, const nn::ModuleBase& module,
                                    const char* fits) {
  fail(style.name(), " is for ", fits, ", but was asked for a ", module.name());
}

}  // namespace tessera::tensor_parallel
