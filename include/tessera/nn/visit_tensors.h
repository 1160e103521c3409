#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/export.h"

TESSERA_API_BEGIN
namespace tessera::nn {

namespace detail::user {

// This declaration hides the functions named visit_tensors of outer namespaces. The compiler then
// finds only the overloads in the namespace of the visited type (argument-dependent lookup).
void visit_tensors() = delete;

template <class T, class Visit>
concept Visitable = requires(T& value, Visit& visit) { visit_tensors(value, visit); };

template <class T, class Visit>
void call(T& value, Visit& visit) {
  visit_tensors(value, visit);
}

}  // namespace detail::user

namespace detail {

template <class T>
struct Tag {};

/// Implements visit_tensors. Chooses an overload by type; for containers operator() calls itself
/// for each element.
struct VisitTensors {
  template <class T, class Visit>
  void operator()(T& value, Visit&& visit) const {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      visit(value);
    } else if constexpr (user::Visitable<T, std::remove_reference_t<Visit>>) {
      user::call(value, visit);
    } else {
      contents(Tag<T>{}, value, visit);
    }
  }

 private:
  template <class Other, class T, class Visit>
  void contents(Tag<Other>, T&, Visit&) const {}
  template <class... Parts, class T, class Visit>
  void contents(Tag<std::tuple<Parts...>>, T& value, Visit& visit) const {
    std::apply([&](auto&... parts) { ((*this)(parts, visit), ...); }, value);
  }
  template <class First, class Second, class T, class Visit>
  void contents(Tag<std::pair<First, Second>>, T& value, Visit& visit) const {
    (*this)(value.first, visit);
    (*this)(value.second, visit);
  }
  template <class Item, class Allocator, class T, class Visit>
  void contents(Tag<std::vector<Item, Allocator>>, T& value, Visit& visit) const {
    if constexpr (!std::is_same_v<Item, bool>) {
      for (Item& item : value) {
        (*this)(item, visit);
      }
    }
  }
  template <class Item, std::size_t N, class T, class Visit>
  void contents(Tag<std::array<Item, N>>, T& value, Visit& visit) const {
    for (Item& item : value) {
      (*this)(item, visit);
    }
  }
  template <class Item, class T, class Visit>
  void contents(Tag<std::optional<Item>>, T& value, Visit& visit) const {
    if (value) {
      (*this)(*value, visit);
    }
  }
  template <class Key, class Item, class Less, class Allocator, class T, class Visit>
  void contents(Tag<std::map<Key, Item, Less, Allocator>>, T& value, Visit& visit) const {
    for (auto& entry : value) {
      (*this)(entry.second, visit);
    }
  }
};

}  // namespace detail

/// visit_tensors(value, visit) calls `visit(at::Tensor&)` for each tensor inside `value`, in order,
/// including undefined tensors. `value`: a tensor, or nested tuples, pairs, vectors, arrays,
/// optionals and maps. Other types have no tensors. For your own struct, define in its namespace:
///   template <class Visit>
///   void visit_tensors(MyBatch& batch, Visit&& visit) { visit(batch.x); }
/// visit_tensors is an object, so that argument-dependent lookup finds only the struct's function.
inline constexpr detail::VisitTensors visit_tensors{};

namespace detail {

/// Returns pointers to all tensors inside `value`, valid until a container inside `value` changes.
template <class T>
std::vector<at::Tensor*> collect_tensors(T& value) {
  std::vector<at::Tensor*> tensors;
  visit_tensors(value, [&](at::Tensor& tensor) { tensors.push_back(&tensor); });
  return tensors;
}

}  // namespace detail

}  // namespace tessera::nn
TESSERA_API_END
