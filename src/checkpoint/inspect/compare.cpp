#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "inspect/step_blocks.h"
#include "load/stored_step.h"
#include "tessera/checkpoint/inspect.h"

namespace tessera::checkpoint {
namespace {

bool is_integer(const at::Tensor& values) {
  return c10::isIntegralType(values.scalar_type(), /*includeBool=*/true);
}

/// NaN where a value is NaN, or both are infinite. Integers of one sign are subtracted as they are:
/// beyond 2^53 a double does not hold each of them.
at::Tensor distance_of(const at::Tensor& a, const at::Tensor& b) {
  at::Tensor rounded = a.to(at::kDouble).sub(b.to(at::kDouble)).abs();
  if (!is_integer(a) || !is_integer(b)) {
    return rounded;
  }
  const at::Tensor x = a.to(at::kLong), y = b.to(at::kLong);
  return at::where(x.lt(0).eq(y.lt(0)), x.sub(y).abs().to(at::kDouble), rounded);
}

/// Real and imaginary part of each number.
at::Tensor parts_of(const at::Tensor& values) {
  return at::view_as_real(values.to(at::kComplexDouble));
}

/// The difference of two tensors, as far as they have been read.
struct Difference {
  double absolute = 0;
  double relative = 0;  ///< to the larger of the two values

  /// A NaN on one side alone, and infinities that are not equal, count as infinitely far. Parts of
  /// complex numbers count as numbers.
  void add(const at::Tensor& a, const at::Tensor& b) {
    if (a.numel() == 0 || at::equal(a, b)) {
      return;
    }
    if (a.is_complex() || b.is_complex()) {
      return add(parts_of(a), parts_of(b));
    }
    const at::Tensor x = a.to(at::kDouble);
    const at::Tensor y = b.to(at::kDouble);
    const at::Tensor apart = distance_of(a, b);
    const at::Tensor same = apart.eq(0)
                                .logical_or(apart.isnan().logical_and(x.eq(y)))
                                .logical_or(x.isnan().logical_and(y.isnan()));
    const double infinity = std::numeric_limits<double>::infinity();
    const at::Tensor distance = apart.nan_to_num(infinity, infinity).masked_fill(same, 0.0);
    const at::Tensor scale = at::maximum(x.abs(), y.abs());
    const at::Tensor ratio = distance.div(scale).nan_to_num(infinity).masked_fill(same, 0.0);
    absolute = std::max(absolute, distance.max().item<double>());
    relative = std::max(relative, ratio.max().item<double>());
  }
};

class StepComparison {
 public:
  StepComparison(const std::filesystem::path& step, const std::filesystem::path& other)
      : folder_(step), one_(manifest_in(step)), other_(other, manifest_in(other)) {
    for (const auto& [name, tensor] : one_.tensors) {
      compare_described(name, tensor);
    }
    for (const auto& [name, tensor] : other_.manifest().tensors) {
      if (!one_.tensors.contains(name)) {
        add(name, "only in the second");
      }
    }
  }

  void compare_values(const Progress& progress) {
    std::uint64_t done = 0;
    std::map<std::string, Difference> differences;
    read_blocks(
        folder_, one_, [this](const std::string& name) { return comparable_.contains(name); },
        [&](const std::string& name, auto offset, const at::Tensor& block) {
          const ManifestTensor& tensor = *other_.find(name);
          const at::Tensor values = at::empty(block.sizes(), scalar_type_of(name, tensor));
          other_.want(name, offset, values);
          other_.read();
          differences[name].add(block, values);
          done += block.nbytes();
          if (progress) {
            progress(done, all_);
          }
        });
    for (const auto& [name, difference] : differences) {
      if (difference.absolute > 0) {
        add(name, fmt::format("largest difference {:.6g}, relative {:.6g}", difference.absolute,
                              difference.relative));
      }
    }
  }

  std::vector<std::string> lines() const {
    std::vector<std::string> lines;
    for (const auto& [name, faults] : faults_) {
      lines.push_back(fmt::format("{}: {}", name, fmt::join(faults, "; ")));
    }
    return lines;
  }

 private:
  void add(const std::string& name, std::string fault) {
    faults_[name].push_back(std::move(fault));
  }

  void compare_described(const std::string& name, const ManifestTensor& tensor) {
    const auto found = other_.manifest().tensors.find(name);
    if (found == other_.manifest().tensors.end()) {
      return add(name, "only in the first");
    }
    const ManifestTensor& same = found->second;
    if (tensor.dtype != same.dtype) {
      add(name, tensor.dtype + " and " + same.dtype);
    }
    if (tensor.sizes != same.sizes) {
      return add(name, fmt::format("[{}] and [{}]", fmt::join(tensor.sizes, ", "),
                                   fmt::join(same.sizes, ", ")));
    }
    comparable_.insert(name);
    all_ += bytes_of_tensor(tensor);
  }

  std::filesystem::path folder_;
  Manifest one_;
  StoredStep other_;
  std::set<std::string> comparable_;
  std::uint64_t all_ = 0;
  std::map<std::string, std::vector<std::string>> faults_;
};

}  // namespace

std::vector<std::string> compare_steps(const std::filesystem::path& step,
                                       const std::filesystem::path& other,
                                       const Progress& progress) {
  StepComparison comparison(step, other);
  comparison.compare_values(progress);
  return comparison.lines();
}

}  // namespace tessera::checkpoint
