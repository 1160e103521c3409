#pragma once

namespace tessera::nn::detail {

/// How many calls of modules this thread is in, one inside another: 1 in the outermost.
int call_depth();

}  // namespace tessera::nn::detail
