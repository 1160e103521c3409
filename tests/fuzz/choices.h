#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera::fuzz {

/// The decisions that make a case, each drawn by its name: it depends on the seed and the name, not
/// on the decisions before it. So a case can be made again with some of its decisions set to the
/// simplest option while the others stay, which is how a faulty case is shrunk.
class Choices {
 public:
  /// The label of a decision by its name; "" is the simplest option. With the name kOthers all
  /// decisions that are not named are the simplest.
  using Labels = std::map<std::string, std::string>;
  static constexpr const char* kOthers = "*";
  /// An option of a decision, drawn in proportion to its weight.
  struct Option {
    std::string label;
    int weight = 1;
  };

  explicit Choices(std::uint64_t seed, Labels fixed = {});

  /// The index of the option drawn. The first option must be the simplest. Throws Error if the name
  /// is fixed to a label that is none of the options'.
  std::size_t pick(const std::string& name, const std::vector<Option>& options);
  /// The same as an enumeration whose values are numbered as the options are.
  template <class E>
  E pick_as(const std::string& name, const std::vector<Option>& options) {
    return static_cast<E>(pick(name, options));
  }
  /// One of `values`; the first is the simplest.
  std::int64_t number(const std::string& name, const std::vector<std::int64_t>& values);
  bool chance(const std::string& name, int percent);

  /// What was drawn and is not the simplest option. With the others at their simplest it is the
  /// whole description of the case.
  const Labels& made() const { return made_; }

 private:
  std::uint64_t seed_;
  Labels fixed_;
  Labels made_;
};

/// "name=label, name=label".
std::string to_string(const Choices::Labels& labels);

}  // namespace tessera::fuzz
