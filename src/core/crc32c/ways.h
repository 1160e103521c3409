// How a CRC-32C is taken by each kind of processor.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera::detail {

/// The polynomial, the coefficient of x^31 in the lowest bit.
inline constexpr std::uint32_t kCrcPolynomial = 0x82f63b78;

/// x * `value` modulo the polynomial, bits in its order.
constexpr std::uint32_t times_x(std::uint32_t value) {
  return (value >> 1) ^ ((value & 1U) != 0 ? kCrcPolynomial : 0);
}

/// From a table, for any processor. As crc32c().
std::uint32_t crc32c_by_table(std::span<const std::byte> bytes, std::uint32_t before);

#if defined(__x86_64__)
/// By the instruction of SSE 4.2, eight bytes each, one after another. As crc32c().
std::uint32_t crc32c_by_instruction(std::span<const std::byte> bytes, std::uint32_t before);

/// By this instruction and by products of polynomials of 128 bits (AVX, PCLMULQDQ) at the same
/// time. As crc32c().
std::uint32_t crc32c_by_both(std::span<const std::byte> bytes, std::uint32_t before);

/// By products of polynomials in AVX-512 (VPCLMULQDQ), 64 bytes at once. As crc32c().
std::uint32_t crc32c_by_products(std::span<const std::byte> bytes, std::uint32_t before);
#endif

}  // namespace tessera::detail
