// Random numbers by the global element (tessera/dtensor/random.h), whatever the part of the batch:
// for parameters above all.

#include "tessera/dtensor/random.h"

#include "tessera/core/error.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/kernels/detail/distribution.h"

namespace tessera {
namespace {

/// The rows of `part` in `whole`, with their place in a tensor that has no others.
detail::RandomPlace place_of_part(const detail::RandomPlace& whole, const PartRows& part) {
  detail::RandomPlace place = whole;
  place.elements.sizes[0] = part.run * part.groups;
  place.elements.boxes.clear();
  for (const Box& box : whole.elements.boxes) {
    part.visit(box.global_offset[0], box.sizes[0],
               [&](std::int64_t row, std::int64_t from, std::int64_t rows) {
                 Box& own = place.elements.boxes.emplace_back(box);
                 own.global_offset[0] = row;
                 own.local_offset[0] += from;
                 own.sizes[0] = rows;
               });
  }
  return place;
}

void fill(const at::Tensor& tensor, const kernels::Distribution& distribution, RandomKey key) {
  const at::Tensor local = local_tensor(tensor);
  const detail::RandomPlace place = detail::own_place(tensor);
  if (key.parts.empty()) {
    detail::fill_random(local, place, distribution, key);
  }
  for (const RandomPart& part : key.parts) {
    detail::fill_random(local, place_of_part(place, part.rows), distribution,
                        {key.seed, part.stream});
  }
}

}  // namespace

std::uint64_t stream_of(const char* name) {
  // Offset basis and prime of FNV-1a for 64 bits.
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

}  // namespace tessera
