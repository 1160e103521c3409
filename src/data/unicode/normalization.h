#pragma once

#include <string>
#include <string_view>

namespace tessera::data {

/// A Unicode normalization form (UAX #15).
struct NormalizationForm {
  bool compatible = false;  ///< NFKC, NFKD
  bool composed = false;    ///< NFC, NFKC
};

/// Appends valid UTF-8 in a form. The time grows with the text alone.
void append_normalized(std::string_view text, NormalizationForm form, std::string& out);

}  // namespace tessera::data
