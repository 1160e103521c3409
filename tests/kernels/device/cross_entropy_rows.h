// What the tests of the CUDA kernels' cross entropy share: rows of logits, their losses and
// gradients by the kernels' host form, and by formulas in fp64.
#pragma once

#include <functional>

#include "device/cross_entropy.h"
#include "kernels/device/one_thread.h"
#include "kernels/device/rounding.h"

namespace tessera::kernels::cross_entropy {

constexpr std::int64_t kIgnored = -100;

/// One of three threads.
struct OneOfThree {
  std::int64_t number;
  std::int64_t first() const { return number; }
  static std::int64_t width() { return 3; }
};

struct Options {
  float label_smoothing = 0;
  float z_loss = 0;
};

/// Rows of logits, whose formulas in fp64 are the oracle.
template <class T>
struct Case {
  Case(std::int64_t row_count, std::int64_t column_count, double scale, Options of_losses = {})
      : rows(row_count),
        columns(column_count),
        options(of_losses),
        logits(normals<T>(rows * columns, scale, 1)),
        of_rows(normals<float>(rows, 1, 2)) {
    for (std::int64_t row = 0; row < rows; ++row) {
      targets.push_back(row % 3 == 2 ? kIgnored : (row * 5 + 2) % columns);
    }
  }

  std::int64_t rows, columns;
  Options options;
  std::vector<T> logits;
  std::vector<float> of_rows;
  std::vector<std::int64_t> targets;

  T& at(std::int64_t row, std::int64_t i) {
    return logits[static_cast<std::size_t>(row * columns + i)];
  }
  double x(std::int64_t row, std::int64_t i) const {
    return static_cast<float>(logits[static_cast<std::size_t>(row * columns + i)]);
  }
  std::int64_t target(std::int64_t row) const { return targets[static_cast<std::size_t>(row)]; }
  double of_row(std::int64_t row) const { return of_rows[static_cast<std::size_t>(row)]; }

  double log_sum_exp(std::int64_t row) const {
    double top = -INFINITY;
    for (std::int64_t i = 0; i < columns; ++i) {
      top = std::max(top, x(row, i));
    }
    double sum = 0;
    for (std::int64_t i = 0; i < columns; ++i) {
      sum += std::exp(x(row, i) - top);
    }
    return std::log(sum) + top;
  }
  double loss(std::int64_t row) const {
    const double lse = log_sum_exp(row);
    double loss = options.z_loss * lse * lse;
    for (std::int64_t i = 0; i < columns; ++i) {
      const double share = (1.0 - options.label_smoothing) * (i == target(row) ? 1 : 0) +
                           options.label_smoothing / static_cast<double>(columns);
      loss += share == 0 ? 0 : share * (lse - x(row, i));
    }
    return target(row) == kIgnored ? 0 : loss;
  }

  Logits call() const {
    return {.data = logits.data(),
            .stride = columns,
            .targets = targets.data(),
            .rows = rows,
            .columns = columns,
            .vocabulary = columns,
            .ignore_index = kIgnored,
            .label_smoothing = options.label_smoothing,
            .z_loss = options.z_loss};
  }
};

struct Losses {
  explicit Losses(std::int64_t rows)
      : losses(static_cast<std::size_t>(rows)), log_sum_exp(losses.size()) {}
  std::vector<float> losses;
  std::vector<double> log_sum_exp;
};

template <class T, int N = kVector<T>>
void run_rows(const CrossEntropy& call) {
  OneThread team;
  for (std::int64_t row = 0; row < call.logits.rows; ++row) {
    write_sums<T>(call, row, sums_of_row<T, N>(call.logits, row, team));
  }
}

template <class T, int N = kVector<T>>
Losses losses_of(const Logits& logits) {
  Losses result(logits.rows);
  run_rows<T, N>(
      {.logits = logits, .losses = result.losses.data(), .log_sum_exp = result.log_sum_exp.data()});
  return result;
}

/// As of ranks with these first columns: of each its part of the rows, and the two reductions.
template <class T>
Losses losses_of_parts(const Case<T>& in, const std::vector<std::int64_t>& first_columns) {
  const auto rows = static_cast<std::size_t>(in.rows);
  struct Part {
    Logits logits;
    std::vector<float> maximum, all_maximum, terms;
  };
  std::vector<Part> parts;
  std::vector<float> all(rows, -INFINITY), sums(3 * rows);
  for (std::size_t i = 0; i < first_columns.size(); ++i) {
    const std::int64_t end = i + 1 < first_columns.size() ? first_columns[i + 1] : in.columns;
    Part part{in.call(), std::vector<float>(rows), std::vector<float>(rows),
              std::vector<float>(3 * rows)};
    part.logits.data = in.logits.data() + first_columns[i];
    part.logits.first_column = first_columns[i];
    part.logits.columns = end - first_columns[i];
    run_rows<T>({.step = CrossEntropyStep::kTerms,
                 .logits = part.logits,
                 .maximum = part.maximum.data(),
                 .all_maximum = part.all_maximum.data(),
                 .terms = part.terms.data()});
    std::ranges::transform(all, part.all_maximum, all.begin(),
                           [](float a, float b) { return std::max(a, b); });
    parts.push_back(std::move(part));
  }
  for (Part& part : parts) {
    const CrossEntropy relative{.step = CrossEntropyStep::kRelative,
                                .logits = part.logits,
                                .maximum = part.maximum.data(),
                                .all_maximum = all.data(),
                                .terms = part.terms.data()};
    for (std::int64_t row = 0; row < in.rows; ++row) {
      finish_row(relative, row);
    }
    std::ranges::transform(sums, part.terms, sums.begin(), std::plus<>());
  }
  Losses result(in.rows);
  const CrossEntropy last{.step = CrossEntropyStep::kLosses,
                          .logits = parts.front().logits,
                          .all_maximum = all.data(),
                          .terms = sums.data(),
                          .losses = result.losses.data(),
                          .log_sum_exp = result.log_sum_exp.data()};
  for (std::int64_t row = 0; row < in.rows; ++row) {
    finish_row(last, row);
  }
  return result;
}

inline void expect_near(double found, double exact, double scale) {
  if (std::isfinite(exact)) {
    EXPECT_NEAR(found, exact, 4e-6 * scale);
  } else {
    EXPECT_TRUE(std::isnan(exact) ? std::isnan(found) : found == exact) << found << " " << exact;
  }
}

template <class T>
void expect_losses(const Case<T>& in, const Losses& found) {
  for (std::int64_t row = 0; row < in.rows; ++row) {
    const double lse = in.log_sum_exp(row), loss = in.loss(row);
    expect_near(found.log_sum_exp[static_cast<std::size_t>(row)], lse, 1 + std::abs(lse));
    expect_near(found.losses[static_cast<std::size_t>(row)], loss, 1 + std::abs(loss));
  }
}

/// By three threads that share each row.
template <class T, int N = kVector<T>>
std::vector<T> gradient_of(const Case<T>& in, CrossEntropyBackward call) {
  std::vector<T> gradient(in.logits.size());
  if (call.gradient == nullptr) {
    call.gradient = gradient.data();
    call.gradient_stride = in.columns;
  }
  for (std::int64_t row = 0; row < in.rows; ++row) {
    for (int thread = 0; thread < 3; ++thread) {
      cross_entropy_backward_row<T, N>(call, row, OneOfThree{thread});
    }
  }
  return gradient;
}

template <class T, int N = kVector<T>>
std::vector<T> gradient_of(const Case<T>& in) {
  const Losses losses = losses_of<T, N>(in.call());
  return gradient_of<T, N>(
      in,
      {.logits = in.call(), .log_sum_exp = losses.log_sum_exp.data(), .of_row = in.of_rows.data()});
}

template <class T>
void expect_gradient(const Case<T>& in, const std::vector<T>& found) {
  for (std::int64_t row = 0; row < in.rows; ++row) {
    const double lse = in.log_sum_exp(row);
    for (std::int64_t i = 0; i < in.columns; ++i) {
      const double softmax = (1 + 2 * in.options.z_loss * lse) * std::exp(in.x(row, i) - lse);
      const double share = (1.0 - in.options.label_smoothing) * (i == in.target(row) ? 1 : 0) +
                           in.options.label_smoothing / static_cast<double>(in.columns);
      const double factor = in.target(row) == kIgnored ? 0 : in.of_row(row);
      const double exponent = std::abs(in.x(row, i) - lse);  // is rounded to fp32
      const double terms = std::abs(factor) * (std::abs(softmax) * (1 + exponent) + share);
      expect_rounded_once(found[static_cast<std::size_t>(row * in.columns + i)],
                          factor * (softmax - share), terms);
    }
  }
}

}  // namespace tessera::kernels::cross_entropy
