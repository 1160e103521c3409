#include "tessera/dtensor/random.h"

#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/layout_math.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/kernels/random.h"

namespace tessera {
namespace {

thread_local std::int64_t batch_part = 0;

kernels::GlobalPlace place_of(const at::Tensor& tensor, std::int64_t first_element = 0) {
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  if (!tessera::is_distributed(tensor)) {
    return kernels::GlobalPlace::whole(std::move(sizes), first_element);
  }
  const ShardingSpec& spec = sharding_spec(tensor);
  TESSERA_CHECK(
      !spec.layout->is_partial(), "random numbers for a tensor of layout ", to_string(*spec.layout),
      " were asked for, but a pending reduction has no elements yet; redistribute it first");
  std::vector<Box> boxes = owned_boxes(*spec.layout, sizes, spec.mesh.coordinate());
  return {std::move(boxes), std::move(sizes), first_element};
}

void fill(const at::Tensor& tensor, const kernels::Distribution& distribution, RandomKey key) {
  kernels::fill_random(local_tensor(tensor).detach(), place_of(tensor), distribution,
                       {key.seed, key.stream});
}

}  // namespace

std::uint64_t stream_of(const char* name) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (; *name != '\0'; ++name) {
    hash = (hash ^ static_cast<unsigned char>(*name)) * 1099511628211ULL;
  }
  return hash;
}

// The finaliser of MurmurHash3, over the stream and a golden-ratio step per index.
std::uint64_t substream(std::uint64_t stream, std::uint64_t index) {
  std::uint64_t x = stream + (index + 1) * 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDULL;
  x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53ULL;
  return x ^ (x >> 33);
}

void uniform_(const at::Tensor& tensor, double from, double to, RandomKey key) {
  TESSERA_CHECK(from <= to, "uniform numbers from ", from, " to ", to, " were asked for");
  fill(tensor, kernels::Uniform{from, to - from}, key);
}

void normal_(const at::Tensor& tensor, double mean, double std, RandomKey key) {
  TESSERA_CHECK(std >= 0.0, "normal numbers with std ", std, " were asked for");
  fill(tensor, kernels::Normal{mean, std}, key);
}

void trunc_normal_(const at::Tensor& tensor, double mean, double std, double low, double high,
                   RandomKey key) {
  fill(tensor, kernels::truncated_normal(mean, std, low, high), key);
}

void bernoulli_(const at::Tensor& tensor, double p, RandomKey key) {
  TESSERA_CHECK(p >= 0.0 && p <= 1.0, "a probability of ", p, " was asked for");
  fill(tensor, kernels::Bernoulli{p}, key);
}

at::Tensor apply_dropout(const at::Tensor& x, double p, RandomKey key, std::int64_t first_element) {
  TESSERA_CHECK(p >= 0.0 && p < 1.0, "dropout with probability ", p,
                " was asked for; it must be in [0, 1)");
  const at::Tensor local =
      kernels::dropout(local_tensor(x), place_of(x, first_element), p, {key.seed, key.stream});
  return tessera::is_distributed(x) ? make_distributed(local, sharding_spec(x), x.sizes().vec())
                                    : local;
}

BatchPart::BatchPart(std::int64_t index, std::int64_t count) : outer_(batch_part) {
  TESSERA_CHECK(index >= 0 && index < count, "part ", index, " of ", count, " was asked for");
  batch_part = index;
}

BatchPart::~BatchPart() {
  batch_part = outer_;
}

std::int64_t BatchPart::first_element(std::int64_t numel) {
  return batch_part * numel;
}

}  // namespace tessera
