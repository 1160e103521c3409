#include <ATen/core/enum_tag.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>

#include "operators/operator_info.h"
#include "tessera/core/error.h"
#include "tessera/internals/detail/tensors.h"

namespace tessera::detail {

// Reads an operator's schema, tags, traits and sharding rule into an OperatorInfo at the operator's
// first use in the process. Later calls read only the OperatorInfo.

namespace {

using Kind = OperatorInfo::ArgumentKind;

bool is_or_is_optional(const c10::Type& type, c10::TypeKind kind) {
  const auto* optional = type.castRaw<c10::OptionalType>();
  return type.kind() == kind || (optional != nullptr && optional->getElementType()->kind() == kind);
}

bool is_tensor(const c10::Type& type) {
  return is_or_is_optional(type, c10::TypeKind::TensorType);
}

bool is_number(const c10::Type& type) {
  return is_or_is_optional(type, c10::TypeKind::NumberType) ||
         is_or_is_optional(type, c10::TypeKind::FloatType);
}

/// Returns the kind of an argument. Numbers that no sharding rule reads, such as a learning rate,
/// are not in the cache key: each new value would need a call plan.
Kind kind_of(const c10::Type& type, bool scalars_are_read) {
  if (is_tensor(type)) {
    return Kind::kTensor;
  }
  if (const auto* list = type.castRaw<c10::ListType>()) {
    const auto& element = *list->getElementType();
    if (element.kind() == c10::TypeKind::TensorType) {
      return Kind::kTensorList;
    }
    if (is_tensor(element)) {
      return Kind::kOptionalTensorList;
    }
    if (is_number(element)) {
      return Kind::kNumberList;
    }
  }
  if (is_number(type) && !scalars_are_read) {
    return Kind::kScalar;
  }
  if (is_or_is_optional(type, c10::TypeKind::GeneratorType)) {
    return Kind::kGenerator;
  }
  if (is_or_is_optional(type, c10::TypeKind::ScalarTypeType)) {
    return Kind::kDType;
  }
  return Kind::kStatic;
}

bool holds_tensors(const c10::Type& type) {
  const auto kind = kind_of(type, true);
  return kind == Kind::kTensor || kind == Kind::kTensorList || kind == Kind::kOptionalTensorList;
}

int aliased_argument(const c10::FunctionSchema& schema, const c10::AliasInfo& returned) {
  const auto& arguments = schema.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->beforeSets() == returned.beforeSets()) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

void find_named_arguments(OperatorInfo& info, const std::vector<c10::Argument>& arguments) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i].name();
    const auto index = static_cast<int>(i);
    if (name == "device") {
      info.device = index;
    } else if (name == "generator") {
      info.generator = index;
    } else if (name == "stride" && i > 0 && arguments[i - 1].name() == "size") {
      info.stride = index;
    } else if (name == "storage_offset" && info.traits.has(Trait::kViewsMemory)) {
      info.storage_offset = index;
    }
  }
}

/// Reads the kinds of the arguments from the operator's schema. info.rule must be set before this
/// call. Uses real_type(), because type() reports a ScalarType as an int.
void read_arguments(OperatorInfo& info, const std::vector<c10::Argument>& arguments) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::Type& type = *arguments[i].real_type();
    info.arguments.push_back(kind_of(type, info.rule.reads_numbers()));
    info.takes_tensors = info.takes_tensors || holds_tensors(type);
    const c10::AliasInfo* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) {
      info.written.push_back(static_cast<int>(i));
    }
  }
}

/// Reads the results from the operator's schema. The viewed argument is the first argument with an
/// alias mark such as "(a)": for split, the marks of argument and result differ.
void read_returns(OperatorInfo& info, const c10::FunctionSchema& schema) {
  for (const c10::Argument& result : schema.returns()) {
    const c10::AliasInfo* alias = result.alias_info();
    OperatorInfo::Return returned{holds_tensors(*result.real_type()), -1};
    if (alias != nullptr && alias->isWrite()) {
      returned.written = aliased_argument(schema, *alias);
    }
    if (alias != nullptr && !alias->isWrite()) {
      const auto argument = std::ranges::find_if(
          schema.arguments(), [](const c10::Argument& a) { return a.alias_info() != nullptr; });
      info.viewed = static_cast<int>(argument - schema.arguments().begin());
    }
    info.returns.push_back(returned);
  }
}

/// Whether libtorch decomposes the operator above autograd, before kDistributedKey. libtorch does
/// not decompose an operator that has a kernel for a backend or for autograd.
bool is_composite(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  constexpr std::array kBefore{DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::Autograd,
                               DispatchKey::AutogradCPU, DispatchKey::CompositeExplicitAutograd};
  return op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
         std::ranges::none_of(kBefore, [&](auto key) { return op.hasKernelForDispatchKey(key); });
}

bool is_decomposed(const OperatorInfo& info, const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  // Random operators such as rand_like (empty_like, then uniform_) are decomposed even if libtorch
  // registers their composite kernel as CompositeExplicitAutograd.
  const bool composite =
      op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
      (info.draws_random && op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd));
  return composite && !op.hasKernelForDispatchKey(DispatchKey::CPU) &&
         (info.draws_random || !info.rule);
}

c10::OperatorName operator_name(const std::string& name) {
  const std::size_t dot = std::min(name.find('.'), name.size());
  return {name.substr(0, dot), dot < name.size() ? name.substr(dot + 1) : ""};
}

/// Suggestions for the message about an unknown operator `missing`: other overloads of the
/// operator, or all operators of its library (not of libtorch, which has thousands).
std::string operators_like(const c10::OperatorName& missing) {
  constexpr std::size_t kShown = 5;
  const std::string library = missing.name.substr(0, missing.name.find("::") + 2);
  std::set<std::string> overloads, neighbours;
  for (const c10::OperatorName& each : c10::Dispatcher::singleton().getAllOpNames()) {
    if (each.name == missing.name) {
      overloads.insert(c10::toString(each));
    } else if (library != "aten::" && each.name.starts_with(library)) {
      neighbours.insert(c10::toString(each));
    }
  }
  const std::set<std::string>& found = overloads.empty() ? neighbours : overloads;
  if (found.empty()) {
    return "";
  }
  const auto end =
      std::next(found.begin(), static_cast<std::ptrdiff_t>(std::min(found.size(), kShown)));
  return fmt::format(" ({}{}{})", overloads.empty() ? library + " has " : "its overloads are ",
                     fmt::join(found.begin(), end, ", "), end == found.end() ? "" : ", ...");
}

/// Checks that the operator of each registered sharding rule exists, and that the rule will be
/// used. src/core cannot check these facts without libtorch.
void check_user_rules() {
  for (const std::string& name : user_ruled_operators()) {
    const c10::OperatorName parts = operator_name(name);
    const auto op = c10::Dispatcher::singleton().findSchema(parts);
    TESSERA_CHECK(op, "register_rule: there is no operator ", name, operators_like(parts),
                  "; correct the name and the overload, or load the library of the operator before "
                  "the first operator runs");
    TESSERA_CHECK(!is_composite(*op), "register_rule: ", name,
                  " calls other operators (CompositeImplicitAutograd), and only the rules of these "
                  "operators apply; remove the rule, or implement the operator for "
                  "CompositeExplicitAutograd or a backend");
  }
}

std::string full_name(const c10::FunctionSchema& schema) {
  return schema.overload_name().empty() ? schema.name()
                                        : schema.name() + "." + schema.overload_name();
}

}  // namespace

OperatorInfo::OperatorInfo(const c10::OperatorHandle& op)
    : name(full_name(op.schema())), traits(name), rule(find_rule(name)) {
  const c10::FunctionSchema& schema = op.schema();
  read_arguments(*this, schema.arguments());
  find_named_arguments(*this, schema.arguments());
  read_returns(*this, schema);
  changes_shape = op.hasTag(at::Tag::inplace_view);
  draws_random = op.hasTag(at::Tag::nondeterministic_seeded);
  decomposes = is_decomposed(*this, op) || traits.has(Trait::kForeach);
  is_own = !name.starts_with("aten::") && !name.starts_with("tessera::");
}

bool OperatorInfo::is_written(std::size_t argument) const {
  return std::ranges::find(written, static_cast<int>(argument)) != written.end();
}

c10::OperatorHandle find_operator(std::string_view name) {
  const c10::OperatorName parts = operator_name(std::string(name));
  return c10::Dispatcher::singleton().findSchemaOrThrow(parts.name.c_str(),
                                                        parts.overload_name.c_str());
}

const OperatorInfo& operator_info(const c10::OperatorHandle& op) {
  // Finds operators that this thread used recently without a lock, by the address of the operator's
  // schema, which does not change.
  struct Slot {
    const void* schema = nullptr;
    const OperatorInfo* info = nullptr;
  };
  thread_local std::array<Slot, 256> recent;
  const void* schema = &op.schema();
  auto& slot = recent[(reinterpret_cast<std::uintptr_t>(schema) >> 6) % recent.size()];
  if (slot.schema == schema) {
    return *slot.info;
  }

  static std::mutex mutex;
  // The map of operators is never destroyed, because cache keys contain addresses of its objects.
  static auto& all = *new std::unordered_map<c10::OperatorName, std::unique_ptr<OperatorInfo>>;
  std::lock_guard lock(mutex);
  auto& info = all[op.operator_name()];
  if (!info) {
    check_user_rules();
    info = std::make_unique<OperatorInfo>(op);
  }
  slot = {schema, info.get()};
  return *info;
}

// The traits (special properties) of operators. Each row lists the operators with one trait. No
// other code depends on operator names, except lowerings (src/dtensor/lowerings/).

namespace {

constexpr std::string_view kNamespace = "aten::";

constexpr std::array kTraitRows{
    // Random operators that draw each number by the element's index in the global tensor.
    TraitRow{Trait::kRandomInplace,
             "uniform_ normal_ bernoulli_.float exponential_ random_.to random_.from"},
    TraitRow{Trait::kNativeDropout, "native_dropout"},

    TraitRow{Trait::kForeach, "_foreach_*"},

    // Operators that have kernels of this library in src/dtensor/overrides/.
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

    TraitRow{Trait::kViewsMemory, "as_strided*"},
    TraitRow{Trait::kUnsafeView, "_unsafe_view"},
    TraitRow{Trait::kLeavesMemory, "empty_like new_empty new_empty_strided"},
    TraitRow{Trait::kReadsOneValue, "_local_scalar_dense equal"},

    TraitRow{Trait::kNumberBesideSum, "where.* masked_fill.* masked_fill_.*"},
    TraitRow{Trait::kDivides, "div.* div_.* divide.* divide_.* true_divide.* true_divide_.*"},

    // Operators that sometimes throw on only some ranks.
    TraitRow{Trait::kFailsByElement, "embedding.* gather.* index.* index_select.*"},
    TraitRow{Trait::kFailsByElement,
             "scatter.* scatter_.* scatter_add.* scatter_add_.* index_put.* index_put_.* "
             "index_add.* index_add_.*"},
    TraitRow{Trait::kFailsByElement, "nll_loss_forward.* nll_loss2d_forward.*"},
};

}  // namespace

OperatorTraits::OperatorTraits(std::string_view name) {
  if (!name.starts_with(kNamespace)) {
    return;
  }
  name.remove_prefix(kNamespace.size());
  fill_ = random_fill(name);
  for (const TraitRow& row : kTraitRows) {
    const std::vector<std::string> patterns = names_in(row.names);
    if (std::ranges::none_of(patterns,
                             [&](const auto& pattern) { return covers(pattern, name); })) {
      continue;
    }
    traits_ |= 1U << static_cast<unsigned>(row.trait);
  }
}

std::span<const TraitRow> trait_rows() {
  return kTraitRows;
}

std::vector<std::string> names_in(std::string_view text) {
  std::vector<std::string> names;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    names.emplace_back(text.substr(at, end - at));
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

namespace {

/// Adds a tensor argument to `bound`. An undefined tensor becomes None, because sharding rules and
/// call plans have no index for an undefined tensor.
Argument bind_tensor(const c10::IValue& value, BoundCall& bound) {
  if (!value.isTensor() || !value.toTensor().defined()) {
    return {};
  }
  const auto& tensor = value.toTensor();
  bound.tensors.push_back(tensor);
  bound.call.tensors.push_back(
      {tensor.sizes().vec(), static_cast<std::int64_t>(tensor.element_size())});
  return TensorRef{static_cast<int>(bound.tensors.size()) - 1};
}

Argument bind_tensor_list(const c10::IValue& value, BoundCall& bound) {
  if (value.isNone()) {
    return {};
  }
  std::vector<TensorRef> refs;
  for (const auto& element : value.toListRef()) {
    const auto ref = bind_tensor(element, bound);
    refs.push_back(std::holds_alternative<TensorRef>(ref) ? std::get<TensorRef>(ref) : TensorRef{});
  }
  return refs;
}

Argument bind_scalar(const c10::IValue& value) {
  if (value.isInt()) {
    return value.toInt();
  }
  if (value.isBool()) {
    return value.toBool();
  }
  if (value.isDouble()) {
    return value.toDouble();
  }
  return {};
}

DType::Kind dtype_kind_of(c10::ScalarType type) {
  using Kind = DType::Kind;
  switch (type) {
    case c10::ScalarType::Bool:
      return Kind::kBool;
    case c10::ScalarType::Byte:
    case c10::ScalarType::UInt16:
    case c10::ScalarType::UInt32:
    case c10::ScalarType::UInt64:
      return Kind::kUnsigned;
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
      return Kind::kSigned;
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
      return Kind::kFloating;
    default:
      return c10::isComplexType(type) ? Kind::kComplex : Kind::kOther;
  }
}

Argument bind_dtype(const c10::IValue& value) {
  if (!value.isInt()) {
    return {};
  }
  const auto type = static_cast<c10::ScalarType>(value.toInt());
  return DType{dtype_kind_of(type), static_cast<std::int64_t>(c10::elementSize(type)),
               value.toInt()};
}

/// Converts an argument that is not a tensor to a value for sharding rules. Values that no sharding
/// rule reads, such as a device, become None.
Argument bind_static(const c10::IValue& value) {
  if (value.isString()) {
    return value.toStringRef();
  }
  if (value.isIntList()) {
    return value.toIntVector();
  }
  if (value.isBoolList()) {
    const auto list = value.toBoolList();
    std::vector<std::int64_t> flags;
    for (std::size_t i = 0; i < list.size(); ++i) {
      flags.push_back(list.get(i));
    }
    return flags;
  }
  return bind_scalar(value);
}

}  // namespace

/// BoundCall omits the value of a kScalar number, because a call plan must not depend on values
/// outside of the cache key.
BoundCall bind_call(const OperatorInfo& info, std::span<const c10::IValue> arguments) {
  using Kind = OperatorInfo::ArgumentKind;
  BoundCall bound;
  bound.call.op = info.name;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto& value = arguments[i];
    switch (info.arguments[i]) {
      case Kind::kTensor:
        bound.call.args.push_back(bind_tensor(value, bound));
        break;
      case Kind::kTensorList:
      case Kind::kOptionalTensorList:
        bound.call.args.push_back(bind_tensor_list(value, bound));
        break;
      case Kind::kDType:
        bound.call.args.push_back(bind_dtype(value));
        break;
      case Kind::kScalar:
      case Kind::kGenerator:
      case Kind::kNumberList:
      case Kind::kStatic:
        bound.call.args.push_back(bind_static(value));
        break;
    }
  }
  return bound;
}

c10::IValue to_ivalue(const Argument& argument, const c10::Type& type,
                      std::span<const at::Tensor> tensors) {
  // Converts a list to the element type that the schema declares. An empty list, or a list with
  // None, does not show its element type.
  struct Convert {
    const c10::Type& type;
    std::span<const at::Tensor> tensors;

    c10::IValue operator()(std::monostate) const { return {}; }
    c10::IValue operator()(bool value) const { return value; }
    c10::IValue operator()(std::int64_t value) const { return value; }
    c10::IValue operator()(double value) const { return value; }
    c10::IValue operator()(const std::string& value) const { return value; }
    c10::IValue operator()(const DType& type) const { return type.id; }
    c10::IValue operator()(const std::vector<std::int64_t>& value) const { return value; }
    c10::IValue operator()(TensorRef ref) const {
      return tensors[static_cast<std::size_t>(ref.index)];
    }
    c10::IValue operator()(const std::vector<TensorRef>& refs) const {
      const auto* list = type.castRaw<c10::ListType>();
      if (list != nullptr && list->getElementType()->kind() == c10::TypeKind::TensorType) {
        c10::List<at::Tensor> result;
        for (auto ref : refs) {
          result.push_back((*this)(ref).toTensor());
        }
        return result;
      }
      c10::List<std::optional<at::Tensor>> result;
      for (auto ref : refs) {
        result.push_back(ref.index < 0 ? std::nullopt : std::optional((*this)(ref).toTensor()));
      }
      return result;
    }
  };
  return std::visit(Convert{type, tensors}, argument);
}

/// Returns the NumberType of a number. The cache key and rule_of_call must use the same NumberType,
/// so both call this function.
NumberType number_type(const c10::IValue& value) {
  return value.isInt()             ? number_type(value.toInt())
         : value.isDouble()        ? number_type(value.toDouble())
         : value.isBool()          ? NumberType::kBool
         : value.isNone()          ? NumberType::kNone
         : value.isComplexDouble() ? number_type(value.toComplexDouble())
                                   : NumberType::kOther;
}

/// Returns the type of a wrapped number, such as 2.0 in at::mul(x, 2.0). Values of other tensors
/// are not read: reading could wait for a GPU.
NumberType number_type(const at::Tensor& tensor) {
  if (!is_wrapped_number(tensor) || !tensor.is_cpu()) {
    return NumberType::kNone;
  }
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Double:
      return number_type(*tensor.const_data_ptr<double>());
    case c10::ScalarType::Long:
      return number_type(*tensor.const_data_ptr<std::int64_t>());
    case c10::ScalarType::ComplexDouble:
      return number_type(*tensor.const_data_ptr<c10::complex<double>>());
    default:
      return NumberType::kNone;
  }
}

}  // namespace tessera::detail
