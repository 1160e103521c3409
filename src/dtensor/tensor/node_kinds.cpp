// The table of autograd's nodes whose operators look at more than one position of a dimension.
// Nodes keep the dimension that they were called with, for their backward.

#include "tensor/node_kinds.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <cctype>
#include <string_view>
#include <typeindex>
#include <typeinfo>
#include <unordered_map>

#include "tessera/dtensor/detail/function_kind.h"

namespace tessera::detail {
namespace {

namespace nodes = torch::autograd::generated;
using torch::autograd::Node;
using Reads = std::vector<ReadDim>;

Reads of_dims(std::int64_t dim) {
  return {{0, dim}};
}

/// No dimension means all, as in the operators.
Reads of_dims(const std::vector<std::int64_t>& dims) {
  Reads reads;
  for (const std::int64_t dim : dims) {
    reads.push_back({0, dim});
  }
  return dims.empty() ? Reads{{0, ReadDim::kAll}} : reads;
}

Reads of_dims(const c10::OptionalArray<std::int64_t>& dims) {
  return of_dims(dims.list.value_or(std::vector<std::int64_t>{}));
}

template <class Kind>
Reads along_dim(const Node& node) {
  return of_dims(static_cast<const Kind&>(node).dim);
}

template <class Kind>
Reads along_dims(const Node& node) {
  return of_dims(static_cast<const Kind&>(node).dims);
}

/// Selecting each position as often as the others repeats heads. Another selection may be of any
/// order; which, only its values tell.
Reads along_selected(const Node& node) {
  const auto& select = static_cast<const nodes::IndexSelectBackward0&>(node);
  const auto dims = std::ssize(select.self_sym_sizes);
  const auto dim = static_cast<std::size_t>(select.dim < 0 ? select.dim + dims : select.dim);
  const c10::SymInt selected = node.input_metadata(0).shape_as_dim_vector()[dim];
  const c10::SymInt& size = select.self_sym_sizes[dim];
  const bool repeats = size > 0 && selected > size && selected % size == 0;
  return repeats ? Reads{} : of_dims(select.dim);
}

Reads along_all(const Node&) {
  return {{0, ReadDim::kAll}};
}

/// What is written, and what it is written from.
template <class Kind>
Reads along_dim_of_both(const Node& node) {
  const std::int64_t dim = static_cast<const Kind&>(node).dim;
  return {{0, dim}, {1, dim}};
}

/// Every slice along `dim` is scaled by its norm.
Reads along_others(const Node& node) {
  const auto dims = std::ssize(node.input_metadata(0).shape_as_dim_vector());
  const std::int64_t kept = static_cast<const nodes::RenormBackward0&>(node).dim;
  Reads reads;
  for (std::int64_t dim = 0; dim < dims; ++dim) {
    if (dim != (kept < 0 ? kept + dims : kept)) {
      reads.push_back({0, dim});
    }
  }
  return reads;
}

/// Positions are counted from the ends of a dimension.
Reads along_padded(const Node& node) {
  const auto& pad = static_cast<const nodes::ConstantPadNdBackward0&>(node).pad;
  Reads reads;
  for (std::size_t i = 0; i + 1 < pad.size(); i += 2) {
    if (pad[i] != 0 || pad[i + 1] != 0) {
      reads.push_back({0, -1 - static_cast<std::int64_t>(i / 2)});
    }
  }
  return reads;
}

/// The diagonal is one of positions.
Reads along_matrix(const Node&) {
  return {{0, -1}, {0, -2}};
}

template <class Kind>
Reads along_normed(const Node& node) {
  Reads reads;
  for (std::int64_t i = 0; i < std::ssize(static_cast<const Kind&>(node).normalized_shape); ++i) {
    reads.push_back({0, -1 - i});
  }
  return reads;
}

Reads along_gated(const Node& node) {
  return {{.dim = static_cast<const nodes::GluBackward0&>(node).dim, .pieces = 2}};
}

Reads along_last(const Node&) {
  return {{0, -1}};
}

/// (..., n, k) times (..., k, m), which are arguments `first` and the one after it.
template <std::size_t first>
Reads along_product(const Node&) {
  return {{first, -1}, {first + 1, -2}};
}

/// Queries and keys meet in their features, keys and values in their positions.
Reads along_attention(const Node&) {
  return {{0, -1}, {1, -1}, {1, -2}, {2, -2}};
}

using Table = std::unordered_map<std::type_index, NodeKind>;
using Aligned = NodeKind::Aligned;

template <class... Kinds>
void add_cuts(Table& table) {
  (table.emplace(typeid(Kinds), NodeKind{.cuts = true}), ...);
}

template <class... Kinds>
void add_along_dim(Table& table) {
  (table.emplace(typeid(Kinds), NodeKind{.aligned = Aligned::kWithAll, .reads = along_dim<Kinds>}),
   ...);
}

template <class... Kinds>
void add_writes(Table& table) {
  (table.emplace(typeid(Kinds),
                 NodeKind{.aligned = Aligned::kWithAll, .reads = along_dim_of_both<Kinds>}),
   ...);
}

template <class Kind>
void add(Table& table, std::vector<ReadDim> (*reads)(const Node&)) {
  table.emplace(typeid(Kind), NodeKind{.aligned = Aligned::kWithAll, .reads = reads});
}

template <class... Kinds>
void add_reductions(Table& table) {
  (table.emplace(typeid(Kinds), NodeKind{.reduces = true, .reads = along_dim<Kinds>}), ...);
}

template <class... Kinds>
void add_reductions_of_all(Table& table) {
  (table.emplace(typeid(Kinds), NodeKind{.reduces = true, .reads = along_all}), ...);
}

template <class... Kinds>
void add_attention(Table& table) {
  (table.emplace(typeid(Kinds), NodeKind{.aligned = Aligned::kWithFirst, .reads = along_attention}),
   ...);
}

void add_products(Table& table) {
  const NodeKind product{.reduces = true, .reads = along_product<0>};
  const NodeKind added{.reduces = true, .reads = along_product<1>};
  table.emplace(typeid(nodes::MmBackward0), product);
  table.emplace(typeid(nodes::BmmBackward0), product);
  table.emplace(typeid(nodes::AddmmBackward0), added);
  table.emplace(typeid(nodes::BaddbmmBackward0), added);
}

Table make_table() {
  using namespace nodes;  // NOLINT(google-build-using-namespace): the table reads as a list
  Table table;
  add_cuts<SliceBackward0, SplitBackward0, SplitWithSizesBackward0, SelectBackward0,
           UnbindBackward0>(table);
  add_along_dim<CummaxBackward0, CumminBackward0, CumprodBackward0, CumsumBackward0,
                GatherBackward0, IndexFillBackward0, IndexFillBackward1, LogSoftmaxBackward0,
                LogcumsumexpBackward0, SafeSoftmaxBackward0, ScatterBackward1, SoftmaxBackward0,
                SortBackward0, SortBackward1, TopkBackward0>(table);
  add_writes<IndexAddBackward0, IndexCopyBackward0, LinalgCrossBackward0, ScatterAddBackward0,
             ScatterBackward0, ScatterReduceBackward0>(table);
  add_reductions<AmaxBackward0, AminBackward0, KthvalueBackward0, LinalgVectorNormBackward0,
                 LogsumexpBackward0, MaxBackward0, MeanBackward1, MedianBackward1, MinBackward0,
                 ModeBackward0, NanmedianBackward1, NansumBackward0, NormBackward1, NormBackward3,
                 ProdBackward1, StdBackward0, StdMeanBackward0, SumBackward1, VarBackward0,
                 VarMeanBackward0>(table);
  add_reductions_of_all<MaxBackward1, MeanBackward0, MedianBackward0, MinBackward1, NormBackward0,
                        NormBackward2, ProdBackward0, SumBackward0>(table);
  add_attention<
      ScaledDotProductCudnnAttentionBackward0, ScaledDotProductEfficientAttentionBackward0,
      ScaledDotProductFlashAttentionBackward0, ScaledDotProductFlashAttentionForCpuBackward0>(
      table);
  add_products(table);
  add<ConstantPadNdBackward0>(table, along_padded);
  add<FlipBackward0>(table, along_dims<FlipBackward0>);
  add<FusedRmsNormBackward0>(table, along_normed<FusedRmsNormBackward0>);
  add<GluBackward0>(table, along_gated);
  add<NativeLayerNormBackward0>(table, along_normed<NativeLayerNormBackward0>);
  add<RenormBackward0>(table, along_others);
  add<RollBackward0>(table, along_dims<RollBackward0>);
  add<TrilBackward0>(table, along_matrix);
  add<TriuBackward0>(table, along_matrix);
  table.emplace(typeid(IndexSelectBackward0), NodeKind{.reads = along_selected});
  return table;
}

Table& table() {
  static Table known = make_table();
  return known;
}

}  // namespace

void register_function_kind(std::type_index node, FunctionKind kind) {
  const Aligned aligned = kind.each_aligned ? Aligned::kEach
                          : kind.aligned    ? Aligned::kWithAll
                                            : Aligned::kNot;
  table().emplace(
      node, NodeKind{.aligned = aligned, .reads = kind.reads_last_dim ? &along_last : nullptr});
}

const NodeKind* kind_of(const Node& node) {
  const auto found = table().find(typeid(node));
  return found != table().end() ? &found->second : nullptr;
}

std::string operator_name(const Node& node) {
  std::string name = node.name();
  name.erase(0, name.rfind(':') == std::string::npos ? 0 : name.rfind(':') + 1);
  name.erase(std::min({name.find("Backward"), name.find("Function"), name.size()}));
  std::string words;
  for (const char c : name) {
    if (std::isupper(static_cast<unsigned char>(c)) != 0 && !words.empty()) {
      words += '_';
    }
    words += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return words;
}

bool is_of_a_program(const Node& node) {
  const std::string_view name = typeid(node).name();
  return name.find("CppNode") != std::string_view::npos && kind_of(node) == nullptr;
}

}  // namespace tessera::detail
