#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "chat/state.h"

namespace tessera::data::chat {

/// A template in the part of Jinja that models' chat templates use. Immutable.
class Template {
 public:
  /// Throws Error, with the line, for what is wrong or not implemented.
  explicit Template(std::string_view source);

  struct Result {
    std::string text;
    std::vector<std::pair<std::size_t, std::size_t>> generated;  ///< begin and end in the text
  };
  /// Throws Error for what a template refuses, and where it does not end soon.
  Result render(Fields variables) const;
  /// Whether it has {% generation %}.
  bool marks_generated() const { return marks_generated_; }

 private:
  Statement body_;
  bool marks_generated_ = false;
};

}  // namespace tessera::data::chat
