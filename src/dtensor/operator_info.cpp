#include "operator_info.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>

namespace tessera::detail {
namespace {

using Kind = OperatorInfo::ArgumentKind;

bool is_optional_of(const c10::Type& type, c10::TypeKind kind) {
  const auto* optional = type.castRaw<c10::OptionalType>();
  return optional != nullptr && optional->getElementType()->kind() == kind;
}

bool is_tensor(const c10::Type& type) {
  return type.kind() == c10::TypeKind::TensorType ||
         is_optional_of(type, c10::TypeKind::TensorType);
}

bool is_number(const c10::Type& type) {
  return type.kind() == c10::TypeKind::NumberType || type.kind() == c10::TypeKind::FloatType ||
         is_optional_of(type, c10::TypeKind::NumberType) ||
         is_optional_of(type, c10::TypeKind::FloatType);
}

Kind kind_of(const c10::Type& type, bool scalars_are_read) {
  if (is_tensor(type)) return Kind::kTensor;
  if (const auto* list = type.castRaw<c10::ListType>()) {
    const auto& element = *list->getElementType();
    if (element.kind() == c10::TypeKind::TensorType) return Kind::kTensorList;
    if (is_tensor(element)) return Kind::kOptionalTensorList;
    if (is_number(element)) return Kind::kIgnored;
  }
  if (is_number(type) && !scalars_are_read) return Kind::kScalar;
  if (type.kind() == c10::TypeKind::GeneratorType ||
      is_optional_of(type, c10::TypeKind::GeneratorType)) {
    return Kind::kIgnored;
  }
  return Kind::kStatic;
}

bool holds_tensors(const c10::Type& type) {
  const auto kind = kind_of(type, true);
  return kind == Kind::kTensor || kind == Kind::kTensorList || kind == Kind::kOptionalTensorList;
}

/// The argument with the alias set of `returned`, or -1.
int aliased_argument(const c10::FunctionSchema& schema, const c10::AliasInfo& returned) {
  const auto& arguments = schema.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->beforeSets() == returned.beforeSets())
      return static_cast<int>(i);
  }
  return -1;
}

/// The functional forms of the operators with which formulas of gradients write.
std::optional<c10::OperatorHandle> functional_form(std::string_view name) {
  struct Form {
    std::string_view in_place;
    const char* name;
    const char* overload;
  };
  constexpr std::array kForms{
      Form{"aten::masked_fill_.Tensor", "aten::masked_fill", "Tensor"},
      Form{"aten::masked_fill_.Scalar", "aten::masked_fill", "Scalar"},
      Form{"aten::scatter_.src", "aten::scatter", "src"},
      Form{"aten::scatter_.value", "aten::scatter", "value"},
      Form{"aten::scatter_add_", "aten::scatter_add", ""},
      Form{"aten::index_add_", "aten::index_add", ""},
      Form{"aten::index_put_", "aten::index_put", ""},
      Form{"aten::_index_put_impl_", "aten::index_put", ""},
      Form{"aten::put_", "aten::put", ""},
  };
  const auto found = std::find_if(kForms.begin(), kForms.end(),
                                  [&](const Form& form) { return form.in_place == name; });
  if (found == kForms.end()) return std::nullopt;
  return c10::Dispatcher::singleton().findSchemaOrThrow(found->name, found->overload);
}

/// Factorisations that throw without being asked to.
bool checks_its_matrices(std::string_view name) {
  constexpr std::array<std::string_view, 6> kNames{
      "aten::_linalg_eigh",   "aten::_linalg_svd",     "aten::linalg_eig",
      "aten::linalg_eigvals", "aten::_linalg_eigvals", "aten::cholesky_inverse"};
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

/// Operators whose local kernels throw for an index out of range, or another bad number.
bool checks_its_numbers(std::string_view name) {
  constexpr std::array<std::string_view, 16> kNames{"embedding",
                                                    "_embedding_bag",
                                                    "gather",
                                                    "scatter",
                                                    "scatter_add",
                                                    "scatter_reduce",
                                                    "index",
                                                    "index_put",
                                                    "index_add",
                                                    "index_copy",
                                                    "index_fill",
                                                    "index_select",
                                                    "take",
                                                    "nll_loss_forward",
                                                    "nll_loss2d_forward",
                                                    "binary_cross_entropy"};
  name.remove_prefix(std::min(name.size(), std::string_view("aten::").size()));
  name = name.substr(0, name.find('.'));
  if (name.ends_with('_')) name.remove_suffix(1);
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

/// as_strided, and its in-place and other forms.
bool views_memory(std::string_view name) {
  return name.starts_with("aten::as_strided");
}

}  // namespace

OperatorInfo::OperatorInfo(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  name = schema.name();
  if (!schema.overload_name().empty()) name += "." + schema.overload_name();
  rule = find_rule(name);
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const auto index = static_cast<int>(i);
    arguments.push_back(kind_of(*argument.real_type(), rule.reads_numbers()));
    takes_tensors = takes_tensors || holds_tensors(*argument.real_type());
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
      written.push_back(index);
    }
    if (argument.name() == "device") device = index;
    // A convolution's stride is another thing.
    const bool after_size = i > 0 && schema.arguments()[i - 1].name() == "size";
    if (argument.name() == "stride" && after_size) stride = index;
    if (argument.name() == "storage_offset" && views_memory(name)) storage_offset = index;
    if (argument.name() == "generator") generator = index;
    if (argument.name() == "check_errors") check_errors = index;
  }
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    Return returned{holds_tensors(*result.real_type()), -1};
    if (alias != nullptr && alias->isWrite()) returned.written = aliased_argument(schema, *alias);
    if (alias != nullptr && !alias->isWrite()) {
      const auto argument = std::find_if(schema.arguments().begin(), schema.arguments().end(),
                                         [](auto& a) { return a.alias_info() != nullptr; });
      viewed = static_cast<int>(argument - schema.arguments().begin());
    }
    returns.push_back(returned);
  }
  unsafe_view = name == "aten::_unsafe_view";
  changes_shape = op.hasTag(at::Tag::inplace_view);
  makes_zeros = name == "aten::new_zeros" || name == "aten::zeros_like";
  fails_by_value = check_errors >= 0 || checks_its_matrices(name);
  fails_by_part = checks_its_numbers(name);
  functional = functional_form(name);
  draws_random = op.hasTag(at::Tag::nondeterministic_seeded);
  // rand_like is empty_like and uniform_: of a random operator every composite form will do.
  const bool composite =
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
      (draws_random && op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd));
  decomposes =
      composite && !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) && (draws_random || !rule);
}

const OperatorInfo& operator_info(const c10::OperatorHandle& op) {
  struct Slot {
    const void* schema = nullptr;
    const OperatorInfo* info = nullptr;
  };
  thread_local std::array<Slot, 256> recent;
  const void* schema = &op.schema();
  auto& slot = recent[(reinterpret_cast<std::uintptr_t>(schema) >> 6) % recent.size()];
  if (slot.schema == schema) return *slot.info;

  static std::mutex mutex;
  static auto& all = *new std::unordered_map<c10::OperatorName, std::unique_ptr<OperatorInfo>>;
  std::lock_guard lock(mutex);
  auto& info = all[op.operator_name()];
  if (!info) info = std::make_unique<OperatorInfo>(op);
  slot = {schema, info.get()};
  return *info;
}

}  // namespace tessera::detail
