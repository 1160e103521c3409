#include "number_text.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <cstddef>

namespace tessera::observe {

std::string grouped(double value, int decimals) {
  std::string text = fmt::format("{:.{}f}", value, decimals);
  if (!std::isfinite(value)) return text;
  const std::size_t first = text.starts_with('-') ? 1 : 0;
  std::size_t position = text.find('.');
  if (position == text.npos) position = text.size();
  while (position > first + 3) {
    position -= 3;
    text.insert(position, 1, ',');
  }
  return text;
}

std::string bytes_text(double bytes) {
  constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; std::fabs(bytes) >= 1024 && unit + 1 < kUnits.size(); ++unit) bytes /= 1024;
  const int decimals = unit == 0 || bytes >= 100 ? 0 : bytes >= 10 ? 1 : 2;
  return fmt::format("{:.{}f} {}", bytes, decimals, kUnits[unit]);
}

std::string compact(double value) {
  for (const auto& [limit, suffix] :
       {std::pair(1e9, "G"), std::pair(1e6, "M"), std::pair(1e4, "k")}) {
    const double scale = limit == 1e4 ? 1e3 : limit;
    if (std::fabs(value) >= limit) return fmt::format("{:.4g}{}", value / scale, suffix);
  }
  return fmt::format("{:.4g}", value);
}

std::string duration_text(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  if (whole < 60) return fmt::format("{}s", whole);
  if (whole < 3600) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  if (whole < 86400) return fmt::format("{}h{:02}m", whole / 3600, whole / 60 % 60);
  return fmt::format("{}d{:02}h", whole / 86400, whole / 3600 % 24);
}

}  // namespace tessera::observe
