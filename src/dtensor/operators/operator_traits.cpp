// The table of the special properties of single operators. Everything that dispatch does by an
// operator's name begins with a row here, except forms, which have separate tables
// (src/dtensor/forms/). A row is for every name in it, and an operator may be in several rows.

#include "operators/operator_traits.h"

#include <algorithm>
#include <array>

namespace tessera::detail {
namespace {

constexpr std::string_view kNamespace = "aten::";

constexpr std::array kTraitRows{
    // Random operators by the global element.
    TraitRow{.trait = Trait::kRandomInplace, .names = "uniform_", .fill = &fill_uniform},
    TraitRow{.trait = Trait::kRandomInplace, .names = "normal_", .fill = &fill_normal},
    TraitRow{.trait = Trait::kRandomInplace, .names = "bernoulli_.float", .fill = &fill_bernoulli},
    TraitRow{.trait = Trait::kRandomInplace, .names = "exponential_", .fill = &fill_exponential},
    TraitRow{.trait = Trait::kRandomInplace, .names = "geometric_", .fill = &fill_geometric},
    TraitRow{.trait = Trait::kRandomInplace, .names = "cauchy_", .fill = &fill_cauchy},
    TraitRow{.trait = Trait::kRandomInplace, .names = "log_normal_", .fill = &fill_log_normal},
    TraitRow{.trait = Trait::kRandomInplace, .names = "random_", .fill = &fill_integers},
    TraitRow{.trait = Trait::kRandomInplace, .names = "random_.to", .fill = &fill_integers_to},
    TraitRow{.trait = Trait::kRandomInplace, .names = "random_.from", .fill = &fill_integers_from},
    TraitRow{Trait::kNativeDropout, "native_dropout"},

    TraitRow{Trait::kForeach, "_foreach_*"},

    // Zeros of backward, and what writes to them.
    TraitRow{Trait::kNewZeros, "new_zeros zeros_like"},
    TraitRow{Trait::kWritesGradients, "masked_fill_.Tensor", "masked_fill.Tensor"},
    TraitRow{Trait::kWritesGradients, "masked_fill_.Scalar", "masked_fill.Scalar"},
    TraitRow{Trait::kWritesGradients, "scatter_.src", "scatter.src"},
    TraitRow{Trait::kWritesGradients, "scatter_.value", "scatter.value"},
    TraitRow{Trait::kWritesGradients, "scatter_add_", "scatter_add"},
    TraitRow{Trait::kWritesGradients, "index_add_", "index_add"},
    TraitRow{Trait::kWritesGradients, "index_put_ _index_put_impl_", "index_put"},
    TraitRow{Trait::kWritesGradients, "put_", "put"},

    // Kernels of our own.
    TraitRow{Trait::kOwnKernel, "detach is_same_size _has_compatible_shallow_copy_type"},
    TraitRow{Trait::kOwnKernel, "max_pool1d kron.out matmul.out"},
    TraitRow{Trait::kOwnKernel, "tensor_split.tensor_indices_or_sections ctc_loss.Tensor"},
    TraitRow{Trait::kOwnKernel, "value_selecting_reduction_backward one_hot"},
    TraitRow{Trait::kOwnKernel, "quantile.* nanquantile.* bernoulli_.Tensor bernoulli.p"},
    TraitRow{Trait::kHelperTensors,
             "_scaled_dot_product_attention_math combinations ctc_loss.IntList istft "
             "linalg_matrix_power linalg_matrix_rank linalg_matrix_rank.atol_rtol_float "
             "linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor matrix_power "
             "pad_sequence vander"},

    // Arguments and results.
    TraitRow{Trait::kViewsMemory, "as_strided*"},
    TraitRow{Trait::kInfersSize, "view view_copy _unsafe_view reshape"},
    TraitRow{Trait::kUnsafeView, "_unsafe_view"},
    TraitRow{Trait::kLeavesMemory, "empty_like new_empty new_empty_strided"},
    TraitRow{Trait::kReadsOneValue, "_local_scalar_dense equal"},

    // Numbers.
    TraitRow{Trait::kNumberBesideSum, "where.* masked_fill.* masked_fill_.*"},
    TraitRow{Trait::kDivides, "div.* div_.* divide.* divide_.* true_divide.* true_divide_.*"},
    TraitRow{Trait::kDivides, "_foreach_div.* _foreach_div_.*"},

    // Failures.
    TraitRow{Trait::kFailsByMatrix,
             "_linalg_eigh _linalg_svd linalg_eig linalg_eigvals _linalg_eigvals cholesky_inverse"},
    TraitRow{Trait::kFailsByElement,
             "embedding.* _embedding_bag.* gather.* index.* index_select.* take.*"},
    TraitRow{Trait::kFailsByElement,
             "scatter.* scatter_.* scatter_add.* scatter_add_.* scatter_reduce.* "
             "scatter_reduce_.* index_put.* index_put_.* index_add.* index_add_.* index_copy.* "
             "index_copy_.* index_fill.* index_fill_.*"},
    TraitRow{Trait::kFailsByElement,
             "nll_loss_forward.* nll_loss2d_forward.* binary_cross_entropy.*"},
};

}  // namespace

/// Tries every pattern of every row, which only OperatorInfo does, once an operator. Those of other
/// libraries have no traits.
OperatorTraits::OperatorTraits(std::string_view name) {
  if (!name.starts_with(kNamespace)) {
    return;
  }
  name.remove_prefix(kNamespace.size());
  for (const TraitRow& row : kTraitRows) {
    const std::vector<std::string> patterns = names_in(row);
    if (std::ranges::none_of(patterns,
                             [&](const auto& pattern) { return covers(pattern, name); })) {
      continue;
    }
    traits_ |= 1U << static_cast<unsigned>(row.trait);
    if (!row.functional.empty()) {
      functional_ = row.functional;
    }
    if (row.fill != nullptr) {
      fill_ = row.fill;
    }
  }
}

std::span<const TraitRow> trait_rows() {
  return kTraitRows;
}

/// There is exactly one blank between two names, also where a literal continues in the next line.
std::vector<std::string> names_in(const TraitRow& row) {
  std::vector<std::string> names;
  for (std::size_t at = 0; at < row.names.size();) {
    const std::size_t end = std::min(row.names.find(' ', at), row.names.size());
    names.emplace_back(row.names.substr(at, end - at));
    at = end + 1;
  }
  return names;
}

bool covers(std::string_view pattern, std::string_view name) {
  if (pattern.ends_with(".*")) {
    pattern.remove_suffix(2);
    return name.substr(0, name.find('.')) == pattern;
  }
  if (pattern.ends_with('*')) {
    pattern.remove_suffix(1);
    return name.starts_with(pattern);
  }
  return name == pattern;
}

}  // namespace tessera::detail
