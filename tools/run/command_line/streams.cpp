#include "streams.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <vector>

#include "tessera/core/error.h"

namespace tessera::run {
namespace {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  for (auto end = text.find(separator); end != std::string::npos;
       end = text.find(separator, begin)) {
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  parts.push_back(text.substr(begin));
  return parts;
}

bool is_mask(const std::string& text) {
  return text.size() == 1 && text[0] >= '0' && text[0] <= '3';
}

// nullopt for text other than the number of a rank.
std::optional<int> rank_of(const std::string& text) {
  int rank = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), rank);
  const bool right = error == std::errc() && stop == text.data() + text.size() && rank >= 0;
  return right ? std::optional(rank) : std::nullopt;
}

void check_rank(const Setting& setting, int rank, int nproc, bool is_new) {
  TESSERA_CHECK(rank < nproc, setting.text, " names local rank ", rank,
                ", and this node's are 0 to ", nproc - 1);
  TESSERA_CHECK(is_new, setting.text, " names local rank ", rank, " twice: leave one out");
}

}  // namespace

Streams::Streams(const Setting& setting, int nproc) {
  if (is_mask(setting.value)) {
    every_ = setting.value[0] - '0';
    return;
  }
  for (const auto& part : split(setting.value, ',')) {
    const auto colon = std::min(part.find(':'), part.size());
    const auto rank = rank_of(part.substr(0, colon));
    const std::string mask = colon < part.size() ? part.substr(colon + 1) : "";
    TESSERA_CHECK(rank && is_mask(mask), setting.text,
                  " is neither 0, 1 (output), 2 (error) or 3 (both), nor LOCAL_RANK:1,... for some "
                  "ranks");
    check_rank(setting, *rank, nproc, single_.try_emplace(*rank, mask[0] - '0').second);
  }
}

Streams Streams::all() {
  Streams streams;
  streams.every_ = kOut | kErr;
  return streams;
}

bool Streams::has_any() const {
  return every_ != 0 ||
         std::ranges::any_of(single_, [](const auto& one) { return one.second != 0; });
}

int Streams::of(int local_rank) const {
  const auto found = single_.find(local_rank);
  return found == single_.end() ? every_ : found->second;
}

std::set<int> local_ranks(const Setting& setting, int nproc) {
  std::set<int> ranks;
  for (const auto& part : split(setting.value, ',')) {
    const auto rank = rank_of(part);
    TESSERA_CHECK(rank, setting.text, " is no list of local ranks such as 0,2");
    check_rank(setting, *rank, nproc, ranks.insert(*rank).second);
  }
  return ranks;
}

}  // namespace tessera::run
