#include "tessera/models/rope.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace tessera::models {
namespace {

/// theta^(-2i / head_dim), (head_dim / 2).
at::Tensor plain_frequencies(double theta, std::int64_t head_dim, c10::Device device) {
  const auto fp32 = at::TensorOptions().dtype(c10::kFloat).device(device);
  return 1.0 / at::pow(theta, at::arange(0, head_dim, 2, fp32) / static_cast<double>(head_dim));
}

/// Stretches theta so that the lowest frequency turns in `length` tokens as far as it did in the
/// original ones.
double dynamic_theta(const Rope& rope, std::int64_t head_dim, std::int64_t length) {
  const auto original = static_cast<double>(rope.scaling.original_positions);
  const double stretch = std::max(static_cast<double>(length), original) / original;
  const auto dim = static_cast<double>(head_dim);
  const double base = rope.scaling.factor * stretch - (rope.scaling.factor - 1);
  return rope.theta * std::pow(base, dim / (dim - 2));
}

/// Frequencies that turn less than low_freq_factor times in the original context are divided, those
/// of more than high_freq_factor turns are kept.
at::Tensor llama3_frequencies(const RopeScaling& s, const at::Tensor& plain) {
  const at::Tensor turns =
      plain * (static_cast<double>(s.original_positions) / (2 * std::numbers::pi));
  const at::Tensor kept =
      ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1);
  return plain * kept + plain / s.factor * (1 - kept);
}

/// The index of the frequency that turns `turns` times in the original context.
double index_of_turns(const Rope& rope, std::int64_t head_dim, double turns) {
  const auto original = static_cast<double>(rope.scaling.original_positions);
  return static_cast<double>(head_dim) * std::log(original / (turns * 2 * std::numbers::pi)) /
         (2 * std::log(rope.theta));
}

at::Tensor yarn_frequencies(const Rope& rope, std::int64_t head_dim, const at::Tensor& plain) {
  const RopeScaling& s = rope.scaling;
  double low = index_of_turns(rope, head_dim, s.beta_fast);
  double high = index_of_turns(rope, head_dim, s.beta_slow);
  if (s.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(head_dim - 1));
  if (low == high) {
    high += 0.001;  // a step instead of a ramp
  }
  const at::Tensor divided =
      ((at::arange(head_dim / 2, plain.options()) - low) / (high - low)).clamp(0, 1);
  return plain / s.factor * divided + plain * (1 - divided);
}

at::Tensor frequencies(const Rope& rope, std::int64_t head_dim, std::int64_t length,
                       c10::Device device) {
  at::Tensor plain = plain_frequencies(rope.theta, head_dim, device);
  switch (rope.scaling.kind) {
    case RopeScaling::Kind::kNone:
      return plain;
    case RopeScaling::Kind::kLinear:
      return plain / rope.scaling.factor;
    case RopeScaling::Kind::kDynamic:
      return plain_frequencies(dynamic_theta(rope, head_dim, length), head_dim, device);
    case RopeScaling::Kind::kLlama3:
      return llama3_frequencies(rope.scaling, plain);
    case RopeScaling::Kind::kYarn:
      return yarn_frequencies(rope, head_dim, plain);
  }
  return plain;
}

}  // namespace

std::pair<at::Tensor, at::Tensor> rope_tables(const Rope& rope, std::int64_t head_dim,
                                              std::int64_t first, std::int64_t last,
                                              std::int64_t length, c10::Device device) {
  const at::Tensor frequency = frequencies(rope, head_dim, length, device);
  const at::Tensor half = at::outer(at::arange(first, last, frequency.options()), frequency);
  const at::Tensor angle = at::cat({half, half}, 1);
  const double factor = rope.scaling.attention_factor;
  return {angle.cos() * factor, angle.sin() * factor};
}

}  // namespace tessera::models
