#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "tessera/core/error.h"
#include "tessera/observe/verify.h"

namespace tessera::observe {
namespace {

/// What comes after the first lines follows from it.
constexpr std::size_t kLines = 8;

std::string counted(std::size_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string equal_line(const VerifyReport& report) {
  std::string compared = report.modules > 0 ? counted(report.modules, "module") : "the loss";
  if (report.parameters > 0) {
    compared += " and " + counted(report.parameters, "parameter");
  }
  return fmt::format(
      "verify: {} equal one rank's (largest difference {:.2g} of the largest value{})", compared,
      report.largest,
      report.modules > 0 ? "" : "; outputs are not compared, since ranks split the samples");
}

/// All before it is equal: where to look.
std::string remedy(const VerifyReport& report) {
  if (report.outputs.empty()) {
    return "all outputs are equal, so look at what sums this gradient: the backward of your "
           "own function, a hook, the parameter's placement in the plan";
  }
  const std::string& fqn = report.outputs.front().fqn;
  return fmt::format(
      "all outputs before are equal, so look at the forward of {}, and at its style "
      "in the plan",
      fqn.empty() ? "the model, and the loss" : "'" + fqn + "'");
}

std::string first_line(const VerifyReport& report) {
  if (!report.weights.empty()) {
    return report.weights;
  }
  const bool of_output = !report.outputs.empty();
  const VerifyDifference& first = of_output ? report.outputs.front() : report.gradients.front();
  std::string line = fmt::format("verify: the {}; {}", first.text, remedy(report));
  const std::size_t outputs = report.outputs.size() - (of_output ? 1 : 0);
  const std::size_t gradients = report.gradients.size() - (of_output ? 0 : 1);
  if (outputs + gradients > 0) {
    line += fmt::format(" ({} and {} more differ)", counted(outputs, "output"),
                        counted(gradients, "gradient"));
  }
  return line;
}

void add_lines(std::string& text, const std::vector<VerifyDifference>& differences,
               std::size_t from) {
  const std::size_t end = std::min(differences.size(), from + kLines);
  for (std::size_t i = from; i < end; ++i) {
    text += "\n  the " + differences[i].text;
  }
  if (end < differences.size()) {
    text += fmt::format("\n  and {} more", differences.size() - end);
  }
}

}  // namespace

std::string VerifyReport::text() const {
  if (ok()) {
    return equal_line(*this);
  }
  std::string text = first_line(*this);
  add_lines(text, outputs, 1);
  add_lines(text, gradients, outputs.empty() ? 1 : 0);
  return text;
}

void VerifyReport::check() const {
  TESSERA_CHECK(ok(), first_line(*this));
}

}  // namespace tessera::observe
