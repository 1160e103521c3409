#include "functional/local_heads.h"

#include <utility>
#include <vector>

#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/dtensor/local_map.h"

namespace tessera::nn {

void check_attention(const char* call, const at::Tensor& q, const at::Tensor& k,
                     const at::Tensor& v, std::int64_t window) {
  const bool fits = q.dim() == 4 && k.dim() == 4 && v.dim() == 4 &&
                    k.sizes().slice(0, 3) == v.sizes().slice(0, 3) && q.size(0) == k.size(0) &&
                    q.size(2) == k.size(2) && q.size(3) == k.size(3) &&
                    (q.size(1) == k.size(1) || (k.size(1) > 0 && q.size(1) % k.size(1) == 0));
  TESSERA_CHECK(fits, call, " was given queries of sizes ", q.sizes(), ", keys of ", k.sizes(),
                " and values of ", v.sizes(),
                "; pass (batch, heads, tokens, width) of the same sequences and tokens, with as "
                "many heads or with key and value heads that divide them");
  TESSERA_CHECK(window >= 0, call, " with a window of ", window,
                " was asked for; give a number of positions, or 0 for all");
}

at::Tensor attend_to_local_heads(const char* call, bool by_batch, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& v, const Attend& attend) {
  for (const at::Tensor* tensor : {&q, &k, &v}) {
    const bool distributed = tessera::is_distributed(*tensor);
    const Layout* layout = distributed ? sharding_spec(*tensor).layout.get() : nullptr;
    TESSERA_CHECK(
        distributed && !layout->is_partial() && (by_batch || layout->mesh_dims_of(0).empty()) &&
            layout->mesh_dims_of(2).empty() && layout->mesh_dims_of(3).empty(),
        call, " was given queries, keys or values of sizes ", tensor->sizes(), ", ",
        distributed ? to_string(*layout) : std::string("plain"), "; all three may be split by ",
        by_batch ? "batch and heads" : "heads", " alone, all alike");
  }
  const DistributedTensor query(q);
  std::vector<std::int64_t> sizes = q.sizes().vec();
  sizes.back() = v.size(-1);
  const auto of_locals = [&](const std::vector<at::Tensor>& locals) {
    return std::vector{attend(locals[0], locals[1], locals[2])};
  };
  return local_map(of_locals, {q, k, v}, query.mesh(), {query.placements()},
                   {.out_sizes = {std::move(sizes)}})
      .front();
}

}  // namespace tessera::nn
