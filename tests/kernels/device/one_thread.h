#pragma once

#include <cstdint>

namespace tessera::kernels {

/// A team of one thread: what the threads of a row agree on is its own.
struct OneThread {
  static std::int64_t first() { return 0; }
  static std::int64_t width() { return 1; }
  template <class T>
  static T max(T x) {
    return x;
  }
  template <class T>
  static T sum(T x) {
    return x;
  }
};

}  // namespace tessera::kernels
