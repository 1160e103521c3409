// Functions that the tables of rules share.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "tessera/core/rule_builder.h"
#include "tessera/core/sharding_rule.h"

namespace tessera::rules {

// For the tables in this folder: the names of operators, and a common rule.

/// "add_" of "aten::add_.Tensor".
std::string_view base_name(std::string_view op);
/// Whether the base name ends in one underscore, as those of in-place operators do.
bool is_inplace(std::string_view op);
/// How many of an overload's last arguments receive its results: 1 for "aten::add.out", 2 for
/// "aten::sort.values", 0 for an overload that returns them.
std::size_t out_count(std::string_view op);

/// The rule of a call whose result has the sizes of argument 0, and is laid out as that.
ShardingRule unchanged(const OpCall& call);

// Each file of this folder provides tables to the registry, one for each family of operators. A new
// table is declared here and named in propagate/rule_registry.cpp.

/// One rule for the operators in `names`: separated by blanks, without "aten::", braces expanded as
/// in a shell ("add{,_}.Tensor add.out"). A new operator is a row in a table.
///
/// The body describes the functional form. For in-place operators (a name that ends in '_') and
/// out= overloads (one that ends in "out") the registry adds what follows from the form.
struct Row {
  std::string_view names;
  RuleFunction::Body body;
  bool reads_numbers = false;  ///< see RuleFunction::reads_numbers
};

/// The rows of several lists: for tables that are too long to read in one piece.
std::vector<Row> join_rows(std::initializer_list<std::vector<Row>> lists);
/// The rows of indexing_table, and those of view_table.
std::vector<Row> advanced_indexing_rows();
std::vector<Row> reshape_rows();

/// The rules of a family of operators that are sharded in the same way.
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
