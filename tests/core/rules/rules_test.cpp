// Every sharding rule against libtorch's operator: for each layout of the arguments the rule is run
// for each coordinate, and the results are put together.
#include <ATen/TensorOperators.h>
#include <ATen/core/Formatting.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/rand_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <random>
#include <sstream>
#include <utility>

#include "rule_cases.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/detail/rule_functions.h"
#include "tessera/core/mesh_shape.h"

namespace tessera::testing {
namespace {

// Parts of tensors, and tensors from parts.

using Coordinate = std::vector<std::int64_t>;

at::Tensor identity_like(const at::Tensor& tensor, ReduceOp op) {
  switch (op) {
    case ReduceOp::kMax:
      return tensor - at::rand_like(tensor);
    case ReduceOp::kMin:
      return tensor + at::rand_like(tensor);
    default:
      return at::full_like(tensor, op == ReduceOp::kProduct ? 1 : 0);
  }
}

/// The term of `tensor` at one coordinate of a partial mesh dimension: terms differ and reduce to
/// it.
at::Tensor term(const at::Tensor& tensor, ReduceOp op, std::int64_t index, std::int64_t count) {
  if (count == 1) {
    return tensor;
  }
  const bool last = index == count - 1;
  const auto step = static_cast<double>(index + 1);
  const double steps = static_cast<double>(count * (count - 1)) / 2;
  switch (op) {
    case ReduceOp::kSum:
      return last ? tensor * (1.0 - 0.25 * steps) - steps : tensor * (0.25 * step) + step;
    case ReduceOp::kAvg:
      return last ? tensor - steps : tensor + step;
    case ReduceOp::kProduct:
      return last ? tensor / std::pow(2.0, static_cast<double>(count - 1))
                  : at::full_like(tensor, 2);
    default:
      return last ? tensor : identity_like(tensor, op);
  }
}

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  switch (op) {
    case ReduceOp::kMax:
      return at::maximum(a, b);
    case ReduceOp::kMin:
      return at::minimum(a, b);
    case ReduceOp::kProduct:
      return a * b;
    default:
      return a + b;
  }
}

/// Reduces over one mesh dimension: coordinates that differ only in it become one.
void reduce(std::vector<Coordinate>& at, std::vector<at::Tensor>& locals, const PartialDim& partial,
            std::int64_t count) {
  std::vector<Coordinate> kept;
  std::vector<at::Tensor> reduced;
  for (std::size_t i = 0; i < at.size(); ++i) {
    Coordinate rest = at[i];
    rest[static_cast<std::size_t>(partial.mesh_dim)] = 0;
    const auto found = std::find(kept.begin(), kept.end(), rest);
    if (found == kept.end()) {
      kept.push_back(rest);
      reduced.push_back(locals[i]);
    } else {
      auto& sum = reduced[static_cast<std::size_t>(found - kept.begin())];
      sum = combine(sum, locals[i], partial.op);
    }
  }
  if (partial.op == ReduceOp::kAvg) {
    for (auto& sum : reduced) {
      sum = sum / static_cast<double>(count);
    }
  }
  at = std::move(kept);
  locals = std::move(reduced);
}

/// All coordinates of a mesh, in the order of its ranks.
std::vector<Coordinate> coordinates(const std::vector<std::int64_t>& mesh) {
  const MeshShape shape(mesh);
  std::vector<Coordinate> all;
  for (std::int64_t position = 0; position < shape.numel(); ++position) {
    all.push_back(shape.coordinate(position));
  }
  return all;
}

/// Double precision, if all tensors have it.
double tolerance_of(const std::vector<at::Tensor>& tensors) {
  const bool single = std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    return tensor.scalar_type() == at::kFloat;
  });
  return single ? 1e-5 : 1e-9;
}

/// Whether sizes, types and, within the tolerance, values are the same.
bool agree(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) {
    return false;
  }
  const auto type = a.is_complex() ? at::kComplexDouble : at::kDouble;
  return at::allclose(a.to(type), b.to(type), tolerance, tolerance, true);
}

/// The positions of a dimension of this size that a coordinate owns.
at::Tensor index_of(const Layout& layout, int dim, std::int64_t size, const Coordinate& at) {
  return at::tensor(global_indices(layout, dim, size, at), at::kLong);
}

/// The local part of `tensor` at a coordinate; for partial layouts, terms that differ between
/// coordinates.
at::Tensor part(const at::Tensor& tensor, const Layout& layout, const Coordinate& at) {
  at::Tensor local = tensor;
  for (int dim = 0; dim < layout.tensor_ndim(); ++dim) {
    if (layout.digits(dim).empty()) {
      continue;
    }
    local = local.index_select(dim, index_of(layout, dim, tensor.size(dim), at));
  }
  for (const PartialDim& partial : layout.partial()) {
    const auto m = static_cast<std::size_t>(partial.mesh_dim);
    local = term(local, partial.op, at[m], layout.mesh_sizes()[m]);
  }
  return local.clone(at::MemoryFormat::Contiguous);
}

/// Puts the parts together; `problem` says where replicas differ or elements are missing.
at::Tensor assemble(std::vector<Coordinate> at, std::vector<at::Tensor> locals,
                    const Layout& layout, const std::vector<std::int64_t>& sizes, double tolerance,
                    std::string& problem) {
  for (std::size_t i = 0; i < at.size(); ++i) {
    if (locals[i].sizes().vec() != local_sizes(layout, sizes, at[i])) {
      std::ostringstream out;
      out << "local sizes " << locals[i].sizes() << ", the layout says "
          << c10::IntArrayRef(local_sizes(layout, sizes, at[i]));
      problem = out.str();
      return {};
    }
  }
  for (auto partial = layout.partial().rbegin(); partial != layout.partial().rend(); ++partial) {
    reduce(at, locals, *partial, layout.mesh_sizes()[static_cast<std::size_t>(partial->mesh_dim)]);
  }
  auto whole = at::zeros(sizes, locals[0].options());
  auto written = at::zeros(sizes, at::kBool);
  for (std::size_t i = 0; i < at.size(); ++i) {
    auto flat = at::zeros({1}, at::kLong).squeeze(0);
    for (int dim = 0; dim < layout.tensor_ndim(); ++dim) {
      const auto size = sizes[static_cast<std::size_t>(dim)];
      flat = flat.unsqueeze(-1) * size + index_of(layout, dim, size, at[i]);
    }
    flat = flat.reshape(-1);
    const auto values = locals[i].reshape(-1);
    const auto before = whole.reshape(-1).index_select(0, flat);
    const auto known = written.reshape(-1).index_select(0, flat);
    if (!agree(at::where(known, before, values), values, tolerance)) {
      problem = "replicas differ";
    }
    whole.view(-1).index_copy_(0, flat, values);
    written.view(-1).index_fill_(0, flat, true);
  }
  if (!written.all().item<bool>()) {
    problem = "some elements are nobody's";
  }
  return whole;
}

// Runs a rule.

using Values = std::vector<c10::IValue>;

/// The tensors among the arguments, lists included, in order.
std::vector<at::Tensor> tensors_of(const Values& arguments) {
  std::vector<at::Tensor> result;
  for (const auto& value : arguments) {
    if (value.isTensor()) {
      result.push_back(value.toTensor());
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor()) {
          result.push_back(element.toTensor());
        }
      }
    }
  }
  return result;
}

/// The lookup in a shard of a vocabulary, row by row, as the library's operator does it.
at::Tensor embedding_rows(const at::Tensor& weight, const at::Tensor& indices, std::int64_t first,
                          std::int64_t) {
  const auto flat = indices.reshape(-1);
  auto result = at::zeros({flat.numel(), weight.size(1)}, weight.options());
  for (std::int64_t i = 0; i < flat.numel(); ++i) {
    const auto row = flat[i].item<std::int64_t>() - first;
    if (row >= 0 && row < weight.size(0)) {
      result[i].copy_(weight[row]);
    }
  }
  auto sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  return result.view(sizes);
}

/// A gather in a shard, by a mask of all positions.
at::Tensor gather_part(const at::Tensor& self, std::int64_t dim, const at::Tensor& index,
                       std::int64_t first, std::int64_t) {
  auto result = at::zeros(index.sizes(), self.options());
  for (std::int64_t i = 0; i < self.size(dim); ++i) {
    const auto picked = index.eq(first + i);
    const auto values = self.gather(dim, at::full_like(index, i));
    result = at::where(picked, values, result);
  }
  return result;
}

TORCH_LIBRARY(rules_test, library) {
  library.def("embedding_rows(Tensor weight, Tensor indices, int first, int rows) -> Tensor",
              &embedding_rows);
  library.def("gather_part(Tensor self, int dim, Tensor index, int first, int size) -> Tensor",
              &gather_part);
}

using LocalCall = ShardingRule::LocalCall;

/// The operator of a local call.
std::string name_of(const LocalCall& call) {
  if (const auto* part = std::get_if<LocalCall::PartOperator>(&call.op)) {
    return *part == LocalCall::PartOperator::kEmbeddingRows ? "rules_test::embedding_rows"
                                                            : "rules_test::gather_part";
  }
  return std::string(std::get<std::string_view>(call.op));
}

c10::OperatorHandle find_operator(const std::string& op) {
  const auto dot = op.find('.');
  return c10::Dispatcher::singleton().findSchemaOrThrow(
      op.substr(0, dot).c_str(), dot == std::string::npos ? "" : op.substr(dot + 1).c_str());
}

/// A type of elements as a rule sees it, by the size of one and by what it promotes to.
DType to_dtype(c10::ScalarType type) {
  using Kind = DType::Kind;
  const auto itemsize = static_cast<std::int64_t>(c10::elementSize(type));
  const auto kind = c10::isComplexType(type)           ? Kind::kComplex
                    : c10::isFloatingType(type)        ? Kind::kFloating
                    : type == at::kBool                ? Kind::kBool
                    : type == at::kByte                ? Kind::kUnsigned
                    : c10::isIntegralType(type, false) ? Kind::kSigned
                                                       : Kind::kOther;
  return {kind, itemsize, static_cast<std::int64_t>(type)};
}

bool names_dtype(const c10::Argument& parameter) {
  const auto type = parameter.real_type()->str();
  return type == "ScalarType" || type == "ScalarType?";
}

Argument to_argument(const c10::IValue& value, const c10::Argument& parameter, OpCall& call) {
  const auto bind = [&](const at::Tensor& tensor) {
    call.tensors.push_back(
        {tensor.sizes().vec(), static_cast<std::int64_t>(tensor.element_size())});
    return TensorRef{static_cast<int>(call.tensors.size()) - 1};
  };
  if (value.isTensor()) {
    return bind(value.toTensor());
  }
  if (value.isString()) {
    return value.toStringRef();
  }
  if (value.isInt() && names_dtype(parameter)) {
    return to_dtype(static_cast<c10::ScalarType>(value.toInt()));
  }
  if (value.isInt()) {
    return value.toInt();
  }
  if (value.isBool()) {
    return value.toBool();
  }
  if (value.isDouble()) {
    return value.toDouble();
  }
  if (value.isIntList()) {
    return value.toIntVector();
  }
  if (value.isTensorList() || value.isOptionalTensorList()) {
    std::vector<TensorRef> refs;
    for (const c10::IValue& element : value.toListRef()) {
      refs.push_back(element.isTensor() ? bind(element.toTensor()) : TensorRef{});
    }
    return refs;
  }
  return {};
}

OpCall to_call(const RuleCase& rule_case, const Values& arguments) {
  OpCall call{.op = rule_case.op, .args = {}, .tensors = {}};
  const auto op = find_operator(rule_case.op);
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    call.args.push_back(to_argument(arguments[i], op.schema().arguments()[i], call));
  }
  return call;
}

/// The arguments, with the tensors replaced in order.
Values with_tensors(const Values& arguments, const std::vector<at::Tensor>& tensors) {
  Values result;
  std::size_t next = 0;
  for (const auto& value : arguments) {
    if (value.isTensor()) {
      result.push_back(tensors[next++]);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (std::size_t i = 0; i < value.toListRef().size(); ++i) {
        list.push_back(tensors[next++]);
      }
      result.push_back(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& element : value.toListRef()) {
        list.push_back(element.isTensor() ? std::optional(tensors[next++]) : std::nullopt);
      }
      result.push_back(list);
    } else {
      result.push_back(value);
    }
  }
  return result;
}

c10::IValue to_ivalue(const Argument& argument, const std::vector<at::Tensor>& tensors) {
  if (const auto* ref = std::get_if<TensorRef>(&argument)) {
    return tensors[static_cast<std::size_t>(ref->index)];
  }
  if (const auto* type = std::get_if<DType>(&argument)) {
    return type->id;
  }
  if (const auto* flag = std::get_if<bool>(&argument)) {
    return *flag;
  }
  if (const auto* integer = std::get_if<std::int64_t>(&argument)) {
    return *integer;
  }
  if (const auto* real = std::get_if<double>(&argument)) {
    return *real;
  }
  if (const auto* list = std::get_if<std::vector<std::int64_t>>(&argument)) {
    return *list;
  }
  return {};
}

std::vector<at::Tensor> run(const std::string& op, Values stack) {
  const auto handle = find_operator(op);
  handle.callBoxed(stack);
  return tensors_of(stack);
}

/// Replaces arguments that are global sizes by local sizes.
void rewrite_sizes(const ShardingRule& rule, const Propagation& decided, const Coordinate& at,
                   Values& arguments) {
  for (const auto& [arg, output, dim, times] : rule.size_arguments) {
    const auto o = static_cast<std::size_t>(output);
    const auto sizes = local_sizes(*decided.outputs[o], decided.output_sizes[o], at);
    auto& argument = arguments[static_cast<std::size_t>(arg)];
    if (dim >= 0) {
      argument = times * sizes[static_cast<std::size_t>(dim)];
    } else {
      argument = sizes;
    }
  }
}

/// Sets arguments that say which elements of an input are local.
void set_places(const ShardingRule& rule, const Propagation& decided,
                const std::vector<at::Tensor>& tensors, const Coordinate& at, Values& arguments) {
  for (const auto& [arg, input] : rule.place_arguments) {
    const auto i = static_cast<std::size_t>(input);
    const auto sizes = tensors[i].sizes().vec();
    arguments[static_cast<std::size_t>(arg)] =
        flat_place({sizes, owned_boxes(*decided.inputs[i], sizes, at)});
  }
}

/// Sets arguments that say where the local part of an input begins.
void set_offsets(const ShardingRule& rule, const Propagation& decided,
                 const std::vector<at::Tensor>& tensors, const Coordinate& at, Values& arguments) {
  for (const auto& [arg, input, dim] : rule.offset_arguments) {
    const auto i = static_cast<std::size_t>(input);
    const auto indices = index_of(*decided.inputs[i], dim, tensors[i].size(dim), at);
    arguments[static_cast<std::size_t>(arg)] =
        indices.numel() == 0 ? std::int64_t{0} : indices[0].item<std::int64_t>();
  }
}

/// Appends the tensors that are written but not returned: a rule lists them as its last outputs.
void add_written(const ShardingRule& rule, const std::vector<at::Tensor>& arguments,
                 std::vector<at::Tensor>& results) {
  for (std::size_t o = results.size(); o < rule.outputs.size(); ++o) {
    for (const auto& pair : rule.inplace) {
      if (pair.output == static_cast<int>(o)) {
        results.push_back(arguments[static_cast<std::size_t>(pair.input)]);
      }
    }
  }
}

/// The results at one coordinate, in the order of ShardingRule::outputs.
std::vector<at::Tensor> run_local(const RuleCase& rule_case, const Values& arguments,
                                  const ShardingRule& rule, const Propagation& decided,
                                  const std::vector<at::Tensor>& locals, const Coordinate& at) {
  Values stack = with_tensors(arguments, locals);
  std::string op = rule_case.op;
  if (decided.use_local_call) {
    op = name_of(*rule.local_call);
    stack.clear();
    for (const auto& argument : rule.local_call->args) {
      stack.push_back(to_ivalue(argument, locals));
    }
  }
  if (!rule.local_call || decided.use_local_call) {
    rewrite_sizes(rule, decided, at, stack);
  }
  set_places(rule, decided, tensors_of(arguments), at, stack);
  if (decided.use_local_call) {
    set_offsets(rule, decided, tensors_of(arguments), at, stack);
  }
  auto results = run(op, std::move(stack));
  if (decided.use_local_call && rule.local_call->scale != 1.0) {
    for (auto& result : results) {
      result = result * rule.local_call->scale;
    }
  }
  add_written(rule, locals, results);
  return results;
}

/// The local inputs of a coordinate; garbage where the rule says that values are not read.
std::vector<at::Tensor> local_arguments(const std::vector<at::Tensor>& tensors,
                                        const ShardingRule& rule, const Propagation& decided,
                                        const Coordinate& at) {
  std::vector<at::Tensor> locals;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    LayoutPtr layout = decided.inputs[i];
    locals.push_back(layout ? part(tensors[i], *layout, at) : tensors[i].clone());
    const auto found = std::find(rule.unread.begin(), rule.unread.end(), static_cast<int>(i));
    if (found != rule.unread.end()) {
      locals.back().fill_(-77);
    }
  }
  return locals;
}

/// Describes how output `o`, put together from the coordinates' results, is wrong.
std::string compare(const std::vector<Coordinate>& all, const std::vector<at::Tensor>& locals,
                    const Propagation& decided, std::size_t o, const at::Tensor& expected,
                    double tolerance) {
  auto sizes = decided.output_sizes[o];
  for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] < 0) {
      sizes[dim] = locals[0].size(static_cast<std::int64_t>(dim));
    }
  }
  std::ostringstream out;
  out << "output " << o << " as " << to_string(*decided.outputs[o]) << ": ";
  if (sizes != expected.sizes().vec()) {
    out << "sizes " << c10::IntArrayRef(sizes) << ", expected " << expected.sizes();
    return out.str();
  }
  std::string problem;
  const auto found = assemble(all, locals, *decided.outputs[o], sizes, tolerance, problem);
  if (problem.empty() && !agree(found, expected, tolerance)) {
    problem = "wrong values";
  }
  if (problem.empty()) {
    return "";
  }
  out << problem;
  if (found.defined()) {
    out << "\n" << found << "\nexpected\n" << expected;
  }
  return out.str();
}

/// Runs `rule_case` as its rule says, in one process, without communication: every coordinate of
/// the mesh gets its part of each argument (terms that add up where a partial one is wanted,
/// garbage where the rule says that values are not read), runs the operator, and the results are
/// put together. Returns what differs from the operator on the whole tensors, "" if nothing does,
/// and "no rule" where the rule does not cover the call.
///
/// `layouts`: how the tensors among the arguments lie, in order; nullptr: plain.
std::string simulate(const RuleCase& rule_case, const std::vector<LayoutPtr>& layouts) {
  const Values arguments = rule_case.arguments();
  const OpCall call = to_call(rule_case, arguments);
  const RuleFunction function = find_rule(rule_case.op);
  const auto rule = function ? function(call) : std::nullopt;
  if (!rule) {
    return "no rule";
  }
  const Propagation decided = propagate(*rule, call, layouts);

  const std::vector<at::Tensor> tensors = tensors_of(arguments);
  const auto distributed = std::find_if(layouts.begin(), layouts.end(), [](auto l) { return l; });
  const auto all = coordinates((*distributed)->mesh_sizes());
  std::vector<std::vector<at::Tensor>> results;  // of each coordinate
  for (const auto& at : all) {
    const auto locals = local_arguments(tensors, *rule, decided, at);
    results.push_back(run_local(rule_case, arguments, *rule, decided, locals, at));
  }
  std::vector<at::Tensor> expected = run(rule_case.op, with_tensors(arguments, tensors));
  add_written(*rule, tensors, expected);
  if (expected.size() > rule->outputs.size()) {
    return "the rule has too few outputs";
  }
  const double tolerance = std::max(tolerance_of(tensors), tolerance_of(expected));
  for (std::size_t o = 0; o < expected.size(); ++o) {
    if (!expected[o].defined() || !decided.outputs[o]) {
      continue;
    }
    std::vector<at::Tensor> locals;
    for (const auto& result : results) {
      locals.push_back(result.at(o));
    }
    const auto problem = compare(all, locals, decided, o, expected[o], tolerance);
    if (!problem.empty()) {
      return problem;
    }
  }
  return "";
}

/// The placements of a tensor on one mesh dimension; integers and masks are never partial.
std::vector<Placement> options(const at::Tensor& tensor) {
  std::vector<Placement> result{Replicate{}};
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    result.push_back(Shard{dim});
  }
  if (!tensor.is_floating_point()) {
    return result;
  }
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMax, ReduceOp::kMin}) {
    result.push_back(Partial{op});
  }
  return result;
}

/// Layouts for all tensors, at random.
std::vector<LayoutPtr> draw(const std::vector<at::Tensor>& tensors,
                            const std::vector<std::int64_t>& mesh, std::mt19937& random) {
  std::vector<LayoutPtr> layouts;
  for (const auto& tensor : tensors) {
    const auto choices = options(tensor);
    Placements placements;
    std::optional<ReduceOp> reduction;  // the result of different reductions depends on their order
    for (std::size_t m = 0; m < mesh.size(); ++m) {
      Placement placement = choices[random() % choices.size()];
      if (const auto* partial = std::get_if<Partial>(&placement)) {
        if (reduction && *reduction != partial->op) {
          placement = Replicate{};
        }
        reduction = partial->op;
      }
      placements.push_back(placement);
    }
    layouts.push_back(to_layout(mesh, placements, tensor.sizes().vec()));
  }
  return layouts;
}

std::string describe(const std::vector<LayoutPtr>& layouts) {
  std::string text;
  for (LayoutPtr layout : layouts) {
    text += (layout ? to_string(*layout) : "plain") + " ";
  }
  return text;
}

/// The number of layouts for each case; TESSERA_RULE_DRAWS=1000 for a thorough run.
int draws() {
  const char* text = std::getenv("TESSERA_RULE_DRAWS");
  return text ? std::atoi(text) : 12;
}

/// The first problem of a case on a mesh, or "".
std::string first_problem(const RuleCase& rule_case, const std::vector<std::int64_t>& mesh) {
  std::mt19937 random(7);
  const int count = draws();
  const auto tensors = tensors_of(rule_case.arguments());
  for (int i = 0; i < count; ++i) {
    const auto layouts = draw(tensors, mesh, random);
    std::string problem;
    try {
      problem = simulate(rule_case, layouts);
    } catch (const std::exception& error) {
      problem = std::string(error.what()).substr(0, 300);
    }
    if (!problem.empty()) {
      return rule_case.op + " with " + describe(layouts) + ": " + problem;
    }
  }
  return "";
}

class Rules : public ::testing::TestWithParam<std::vector<std::int64_t>> {
 protected:
  void expect_right(const std::vector<RuleCase>& cases) {
    for (const auto& rule_case : cases) {
      EXPECT_EQ(first_problem(rule_case, GetParam()), "");
    }
  }
};

TEST_P(Rules, Pointwise) {
  expect_right(pointwise_cases());
}
TEST_P(Rules, Reductions) {
  expect_right(reduction_cases());
}
TEST_P(Rules, Views) {
  expect_right(view_cases());
}
TEST_P(Rules, Indexing) {
  expect_right(indexing_cases());
}
TEST_P(Rules, Networks) {
  expect_right(network_cases());
}
TEST_P(Rules, Fused) {
  expect_right(fused_cases());
}
TEST_P(Rules, Lists) {
  expect_right(list_cases());
}

// Two ranks; more ranks than most sizes have elements, so that shards are empty; FSDP over TP.
INSTANTIATE_TEST_SUITE_P(Meshes, Rules,
                         ::testing::Values(std::vector<std::int64_t>{2},
                                           std::vector<std::int64_t>{4},
                                           std::vector<std::int64_t>{2, 2}));

}  // namespace

}  // namespace tessera::testing
