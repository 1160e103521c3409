#include "fuzz/choices.h"

#include <utility>

#include "tessera/core/error.h"

namespace tessera::fuzz {
namespace {

/// A number that every bit of the seed and the name has a part in: FNV-1a, mixed by splitmix64.
std::uint64_t hash_of(std::uint64_t seed, const std::string& name) {
  std::uint64_t hash = 0xcbf29ce484222325 ^ (seed * 0x9e3779b97f4a7c15);
  for (const unsigned char c : name) {
    hash = (hash ^ c) * 0x100000001b3;
  }
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111eb;
  return hash ^ (hash >> 31);
}

std::size_t drawn(std::uint64_t hash, const std::vector<Choices::Option>& options) {
  int total = 0;
  for (const Choices::Option& option : options) {
    total += option.weight;
  }
  int rest = static_cast<int>(hash % static_cast<std::uint64_t>(total));
  std::size_t index = 0;
  while (rest >= options[index].weight) {
    rest -= options[index++].weight;
  }
  return index;
}

std::size_t index_of(const std::string& name, const std::string& label,
                     const std::vector<Choices::Option>& options) {
  for (std::size_t i = 0; i < options.size(); ++i) {
    if (options[i].label == label) {
      return i;
    }
  }
  fail("'", name, "' was set to '", label, "', which is none of its options");
}

}  // namespace

Choices::Choices(std::uint64_t seed, Labels fixed) : seed_(seed), fixed_(std::move(fixed)) {}

std::size_t Choices::pick(const std::string& name, const std::vector<Option>& options) {
  const auto fixed = fixed_.find(name);
  std::size_t index = 0;
  if (fixed == fixed_.end()) {
    index = fixed_.contains(kOthers) ? 0 : drawn(hash_of(seed_, name), options);
  } else if (!fixed->second.empty()) {
    index = index_of(name, fixed->second, options);
  }
  if (index > 0) {
    made_[name] = options[index].label;
  }
  return index;
}

std::int64_t Choices::number(const std::string& name, const std::vector<std::int64_t>& values) {
  std::vector<Option> options;
  for (const std::int64_t value : values) {
    options.push_back({std::to_string(value)});
  }
  return values[pick(name, options)];
}

bool Choices::chance(const std::string& name, int percent) {
  return pick(name, {{"no", 100 - percent}, {"yes", percent}}) == 1;
}

std::string to_string(const Choices::Labels& labels) {
  std::string text;
  for (const auto& [name, label] : labels) {
    text += (text.empty() ? "" : ", ") + name + "=" + label;
  }
  return text;
}

}  // namespace tessera::fuzz
