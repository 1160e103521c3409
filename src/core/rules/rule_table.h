#pragma once

#include <string_view>
#include <vector>

#include "tessera/core/sharding_rule.h"

namespace tessera::rules {

/// One rule for the operators in `names`: separated by blanks, without "aten::", braces expanded as
/// in a shell ("add{,_}.Tensor add.out").
///
/// The body describes the functional form. In-place operators (a name ending in '_') and out=
/// overloads (ending in "out") of one result get their constraints from the registry.
struct Row {
  std::string_view names;
  RuleFunction::Body body;
  bool reads_numbers = false;  ///< see RuleFunction::reads_numbers
};

/// The rules of a family of operators that are sharded alike.
struct Table {
  std::string_view family;
  std::vector<Row> rows;
};

Table attention_table();
Table batched_table();
Table convolution_table();
Table creation_table();
Table embedding_table();
Table foreach_table();
Table indexing_table();
Table joining_table();
Table loss_table();
Table matmul_table();
Table normalisation_table();
Table optimizer_table();
Table pointwise_table();
Table random_table();
Table reduction_table();
Table scan_table();
Table view_gradient_table();
Table view_table();

}  // namespace tessera::rules
