#pragma once

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace tessera::detail {

/// The local tensors of a list, borrowed from the arguments: counting references to hundreds of
/// tensors would cost more than all the rest. The memory is kept for the thread's next list; a
/// list that is made while others live (an operator of several, a kernel that comes here again)
/// takes its own.
class LocalList {
 public:
  explicit LocalList(std::size_t size) {
    if (!spare().empty()) {
      tensors_ = std::move(spare().back());
      spare().pop_back();
    }
    tensors_.reserve(size);
  }
  LocalList(LocalList&& other) noexcept : tensors_(std::move(other.tensors_)) {}
  LocalList(const LocalList&) = delete;
  LocalList& operator=(LocalList&&) = delete;
  // The elements own nothing: a plain clear() would give up references that were never taken.
  ~LocalList() {
    for (at::Tensor& tensor : tensors_) {
      Borrow::destroyBorrow(tensor);
    }
    tensors_.clear();
    if (tensors_.capacity() > 0 && spare().size() < spare().capacity()) {
      spare().push_back(std::move(tensors_));
    }
  }

  void add(const at::Tensor& tensor) { tensors_.push_back(Borrow::createBorrow(tensor)); }

  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  operator at::TensorList() const { return tensors_; }
  operator at::ITensorListRef() const { return at::TensorList(tensors_); }

 private:
  using Borrow = c10::MaybeOwnedTraits<at::Tensor>;
  using Buffer = std::vector<at::Tensor>;

  /// Buffers that no list of this thread uses: at most 4, for no unboxed operator has more lists.
  /// The capacity is the bound, so that keeping one never allocates.
  static std::vector<Buffer>& spare() {
    thread_local std::vector<Buffer> buffers = [] {
      std::vector<Buffer> made;
      made.reserve(4);
      return made;
    }();
    return buffers;
  }

  Buffer tensors_;
};

}  // namespace tessera::detail
