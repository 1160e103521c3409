#include <ATen/Context.h>
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

#include "random/fills.h"
#include "rank/rank.h"
#include "tessera/comm/agreement.h"
#include "tessera/comm/detail/agreement.h"
#include "tessera/comm/detail/scopes.h"
#include "tessera/core/detail/layout_math.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/random_region.h"
#include "tessera/dtensor/detail/thread_modes.h"
#include "tessera/dtensor/random.h"
#include "tessera/dtensor/sharding_spec.h"
#include "tessera/dtensor/strict_scope.h"
#include "tessera/internals/detail/dispatch_keys.h"
#include "tessera/kernels/detail/random.h"

namespace tessera {

// Random numbers that depend on an element's index in the global tensor, mainly for parameters.

namespace {

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

kernels::Uniform uniform_between(double from, double to) {
  TESSERA_CHECK(from <= to, "uniform_: from is ", from, " and to is ", to, "; pass from <= to");
  return {from, to - from};
}

kernels::Normal normal_with(double mean, double std) {
  TESSERA_CHECK(std >= 0.0, "normal_: std is ", std, "; pass a std of at least 0");
  return {mean, std};
}

kernels::Bernoulli bernoulli_of(double p) {
  TESSERA_CHECK(p >= 0.0 && p <= 1.0, "bernoulli_: p is ", p, "; pass a p from 0 to 1");
  return {p};
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
  // The FNV-1a hash: the 64-bit offset basis here, the 64-bit FNV prime in the loop.
  std::uint64_t hash = 14695981039346656037ULL;
  for (; *name != '\0'; ++name) {
    hash = (hash ^ static_cast<unsigned char>(*name)) * 1099511628211ULL;
  }
  return hash;
}

// The finaliser of MurmurHash3, applied to stream + (index + 1) * 2^64 / golden ratio.
std::uint64_t substream(std::uint64_t stream, std::uint64_t index) {
  std::uint64_t x = stream + (index + 1) * 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDULL;
  x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53ULL;
  return x ^ (x >> 33);
}

void uniform_(const at::Tensor& tensor, double from, double to, RandomKey key) {
  fill(tensor, uniform_between(from, to), key);
}

void normal_(const at::Tensor& tensor, double mean, double std, RandomKey key) {
  fill(tensor, normal_with(mean, std), key);
}

void trunc_normal_(const at::Tensor& tensor, double mean, double std, double low, double high,
                   RandomKey key) {
  fill(tensor, kernels::truncated_normal(mean, std, low, high), key);
}

void bernoulli_(const at::Tensor& tensor, double p, RandomKey key) {
  fill(tensor, bernoulli_of(p), key);
}

// The state of a rank's random operators, and libtorch's generator for operators that run on
// gathered tensors. After manual_seed(), all ranks must call the same random operators.

namespace {

/// Protects the process's default generators, which ranks share if ranks are threads. The lock
/// covers only local operators, so no rank waits for a collective.
std::mutex& turns() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

void manual_seed(std::uint64_t seed) {
  set_random_state({seed, 0});
}
RandomState random_state() {
  const auto rank = detail::RankState::here();
  const std::lock_guard lock(rank->mutex);
  return rank->random;
}
void set_random_state(RandomState state) {
  const auto rank = detail::RankState::here();
  const std::lock_guard lock(rank->mutex);
  rank->random = state;
}

namespace detail {

RandomKey next_random_key() {
  // The stream "at::" differs from the streams of parameters, which are derived from FQNs.
  const auto rank = RankState::here();
  const std::lock_guard lock(rank->mutex);
  return {rank->random.seed, substream(stream_of("at::"), rank->random.calls++)};
}

SeededGenerator::SeededGenerator(c10::Device device, RandomKey key)
    : turn_(turns()),
      generator_(at::globalContext().defaultGenerator(device)),
      outer_(generator_.get_state()) {
  // Other threads of libtorch may draw from the generator, so its mutex is locked. A generator
  // takes one seed: a combination of seed and stream.
  std::lock_guard lock(generator_.mutex());
  generator_.set_current_seed(key.seed ^ key.stream);
}

SeededGenerator::~SeededGenerator() {
  // Restores the generator's state, from which the program's own draws continue.
  generator_.set_state(outer_);
}

// Finds the global elements for which this rank draws random numbers. BatchRows determines this
// rank's rows of the batch. The tensor's layout determines this rank's shard of other dimensions.

namespace {

bool replays_here() {
  const ActiveRandomRegion* here =
      CarriedScope<Carried::kRandomRegion, ActiveRandomRegion>::active();
  return here != nullptr && here->replays;
}

bool is_parameter(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad() && tensor.is_leaf();
}

/// Returns the elements of this rank's shard, as a list of blocks of the global tensor.
RandomPlace place_of_shard(const at::Tensor& tensor) {
  const ShardingSpec& spec = sharding_spec(tensor);
  TESSERA_CHECK(!spec.layout->is_partial(), "random numbers cannot fill a tensor of layout ",
                to_string(*spec.layout),
                ", which is a pending reduction; redistribute the tensor first");
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  std::vector<Box> boxes = owned_boxes(*spec.layout, sizes, spec.mesh.coordinate());
  return {{std::move(boxes), std::move(sizes)},
          local_tensor(tensor).sizes().vec(),
          !spec.layout->is_replicated()};
}

}  // namespace

RandomPlace own_place(const at::Tensor& tensor) {
  if (tessera::is_distributed(tensor)) {
    return place_of_shard(tensor);
  }
  return {kernels::GlobalPlace::whole(tensor.sizes().vec()), tensor.sizes().vec()};
}

void fill_random(const at::Tensor& local, const RandomPlace& place,
                 const kernels::Distribution& distribution, RandomKey key) {
  const kernels::PhiloxKey philox{key.seed, key.stream};
  // detach(), so that a leaf that requires grad can be written.
  const at::Tensor plain = local.detach();
  if (plain.sizes() == c10::IntArrayRef(place.local_sizes)) {
    return kernels::fill_random(plain, place.elements, distribution, philox);
  }
  const at::Tensor values = plain.contiguous().view(place.local_sizes);
  kernels::fill_random(values, place.elements, distribution, philox);
  if (!plain.is_contiguous()) {
    plain.copy_(values.view(plain.sizes()));
  }
}

BatchRows::BatchRows(std::vector<DeviceMesh> dims, std::optional<std::vector<std::int64_t>> sizes)
    : dims_(std::move(dims)), sizes_(std::move(sizes)) {
  for (const DeviceMesh& dim : dims_) {
    ranks_ *= dim.size();
  }
}

std::vector<std::int64_t> BatchRows::settle(std::vector<std::int64_t> values) {
  if (index_ >= 0 || settled_ || ranks_ == 1) {
    return values;
  }
  settled_ = true;
  // Counts the batch rows of the ranks before this rank. Ranks along the innermost mesh dimension
  // have consecutive rows, so the loop over mesh dimensions starts there.
  std::int64_t rows = sizes_ ? sizes_->front() : 0;
  values.push_back(rows == 1 ? 1 : 0);
  for (auto dim = dims_.rbegin(); dim != dims_.rend(); ++dim) {
    if (dim->size() == 1) {
      continue;
    }
    values.push_back(std::exchange(rows, 0));
    const comm::PurposeScope purpose(dim->group(), "the rows of the batch");
    const auto all = comm::gather_on_hosts(dim->group(), values);
    values.pop_back();
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (rank == static_cast<std::size_t>(dim->local_rank())) {
        before_ += rows;
      }
      rows += all[rank].back();
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = std::max(values[i], all[rank][i]);
      }
    }
  }
  any_has_one_ = values.back() != 0;
  values.pop_back();
  return values;
}

/// Whether dimension 0 of `sizes` is the batch: the size of the input's first dimension, or a
/// product of the input's first sizes.
bool BatchRows::begins_with_rows(const RandomCall& call, c10::IntArrayRef sizes) const {
  const std::int64_t rows = sizes_->front();
  const auto refuse = [&](const char* why) {
    fail(call.name, " draws random numbers of sizes ", sizes, " in a forward on ", ranks_,
         " data-parallel ranks; this rank has ", rows, rows == 1 ? " row" : " rows",
         " of the batch, and ", why,
         ", so it is not known which of the numbers belong to this rank; put the batch dimension "
         "first, draw like an input of forward (rand_like), or use a BatchPart (BatchPart(0, 1) if "
         "all rows share the numbers)");
  };
  if (sizes.empty() || is_parameter(call.source)) {
    return false;
  }
  // A first dimension of size 1 can be one row of the batch, or no batch dimension. All ranks
  // throw; otherwise some ranks would wait in a collective.
  const bool may_be_one_row = sizes[0] == 1 || (rows > 0 && sizes[0] == rows);
  if (!call.source.defined() && any_has_one_ && may_be_one_row) {
    refuse("a rank has only 1 row, which does not show whether the first dimension is the batch");
  }
  if (rows == 0) {
    return false;
  }
  const bool divides = sizes[0] % rows == 0;
  if (!divides) {
    // A tensor computed from the forward's input has a multiple of the input's rows, or one row.
    if (call.source.defined() && sizes[0] != 1) {
      refuse("the first size is not a multiple of the number of rows");
    }
    return false;
  }
  std::int64_t folded = 1;
  const bool like_input = std::ranges::any_of(*sizes_, [&](std::int64_t size) {
    folded *= size;
    return sizes[0] == folded;
  });
  // The sizes may be (sequence, batch, features), if the program has transposed the input.
  if (sizes.size() > 2 && sizes[0] != rows && sizes[1] == rows && (!like_input || rows == 1)) {
    refuse("the second dimension may be the batch");
  }
  if (call.source.defined()) {
    return true;
  }
  if (!like_input) {
    refuse("the first dimension may or may not be the batch");
  }
  return true;
}

void BatchRows::move(RandomPlace& place, const RandomCall& call, c10::IntArrayRef sizes) {
  const std::int64_t numel = c10::multiply_integers(sizes);
  if (ranks_ == 1) {
    return;
  }
  if (index_ >= 0) {
    place.elements.first_element = index_ * numel;
    place.is_part = true;
    return;
  }
  TESSERA_CHECK(sizes_, call.name, " draws random numbers in a forward on ", ranks_,
                " data-parallel ranks, but no input of forward has rows, so the part of the batch "
                "on this rank is not known; pass the batch to forward, or use a BatchPart");
  settle();
  if (begins_with_rows(call, sizes)) {
    // The number of elements in the batch rows of all ranks before this rank.
    place.elements.first_element = before_ * (numel / sizes_->front());
    place.is_part = true;
  }
}

RandomRegion::RandomRegion(std::shared_ptr<RandomRegion> outer, std::shared_ptr<BatchRows> rows,
                           DeviceMesh replicated_on)
    : outer_(std::move(outer)), rows_(std::move(rows)), replicated_on_(std::move(replicated_on)) {
  if (outer_ == nullptr) {
    return;
  }
  // Plain tensors from to_local() can be filled only if a BatchPart declares this rank's rows.
  hands_out_parts_ = outer_->hands_out_parts_ && (rows_ == nullptr || !rows_->is_given());
  rows_ = rows_ != nullptr ? rows_ : outer_->rows_;
}

bool RandomRegion::replicates_on(const DeviceMesh& mesh) const {
  return (replicated_on_ && replicated_on_ == mesh) ||
         (outer_ != nullptr && outer_->replicates_on(mesh));
}

void RandomRegion::note_part() {
  for (RandomRegion* region = this; region != nullptr; region = region->outer_.get()) {
    region->hands_out_parts_ = true;
  }
}

RandomPlace RandomRegion::place_of(const RandomCall& call) {
  auto& places = outermost().places_;
  const std::pair key(call.id.seed, call.id.stream);
  if (replays_here()) {
    const auto found = places.find(key);
    if (found != places.end()) {
      return found->second;
    }
  }
  RandomPlace place = find_place(call);
  if (c10::GradMode::is_enabled()) {  // for a recomputation of this forward
    places.insert_or_assign(key, place);
  }
  return place;
}

RandomPlace RandomRegion::find_place(const RandomCall& call) const {
  const bool plain = !tessera::is_distributed(call.tensor);
  TESSERA_CHECK(
      !plain || !hands_out_parts_ || call.tensor.numel() <= 1 || plain_tensors_are_replicated(),
      call.name, " draws for a plain tensor of sizes ", call.tensor.sizes(),
      " after a local part was taken from a distributed tensor (to_local, use_local_output), so "
      "the elements on this rank are not known; keep the tensor distributed, pass the part in a "
      "BatchPart, or draw in a ReplicationScope if the tensor is equal on all ranks");
  RandomPlace place = own_place(call.tensor);
  if (rows_ != nullptr) {
    rows_->move(place, call, call.tensor.sizes());
  }
  return place;
}

const RandomRegionPtr& random_region() {
  static const RandomRegionPtr none;
  const ActiveRandomRegion* here =
      CarriedScope<Carried::kRandomRegion, ActiveRandomRegion>::active();
  return here != nullptr ? here->region : none;
}

RandomPlace random_place(const RandomCall& call) {
  if (const RandomRegionPtr& region = random_region()) {
    return region->place_of(call);
  }
  return own_place(call.tensor);
}

bool plain_is_replicated_on(const DeviceMesh& mesh) {
  if (plain_tensors_are_replicated()) {
    return true;
  }
  const RandomRegionPtr& region = random_region();
  return region != nullptr && region->replicates_on(mesh);
}

LocalPartsScope::LocalPartsScope()
    : region_(random_region()), before_(region_ != nullptr && region_->hands_out_parts_) {}

LocalPartsScope::~LocalPartsScope() {
  for (RandomRegion* region = region_.get(); region != nullptr; region = region->outer_.get()) {
    region->hands_out_parts_ = before_;
  }
}

RandomRegionScope::RandomRegionScope(RandomRegionPtr region, bool replays)
    : scope_({std::move(region), replays || replays_here()}),
      guard_(random_region() != nullptr ? c10::DispatchKeySet(kRandomKey) : c10::DispatchKeySet()) {
}

namespace {

using Arguments = std::span<const c10::IValue>;

at::Tensor numbers(const RandomTarget& target, const kernels::Distribution& distribution,
                   RandomKey key) {
  auto values = at::empty(target.local.sizes(), target.local.options().dtype(at::kDouble));
  fill_random(values, target.place, distribution, key);
  return values;
}

at::Tensor uniform_numbers(const RandomTarget& target) {
  return numbers(target, kernels::Uniform{0, 1}, target.key);
}

/// Whether `value` is in the range of `type`. `type` need not represent `value` exactly.
bool holds(c10::ScalarType type, double value) {
  return AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, type, "holds", [&] {
    using Limits = std::numeric_limits<scalar_t>;
    return value >= static_cast<double>(Limits::lowest()) &&
           value <= static_cast<double>(Limits::max());
  });
}

// RandomFill functions of the random operators of at::. The kernels' uniform, normal and Bernoulli
// numbers are bit-equal on CPU and CUDA. libtorch derives other distributions from uniform numbers.

void check_is_floating(const RandomTarget& target, const char* op) {
  TESSERA_CHECK(target.local.is_floating_point(), op, " cannot fill a tensor of ",
                c10::toString(target.local.scalar_type()), "; pass a floating-point tensor");
}

void refuse_complex(const RandomTarget& target, const char* op) {
  TESSERA_CHECK(!target.local.is_complex(), op, " cannot fill a tensor of ",
                c10::toString(target.local.scalar_type()), "; pass a real tensor");
}

void fill_uniform(const RandomTarget& target, Arguments arguments) {
  check_is_floating(target, "uniform_");
  const double from = arguments[1].toDouble();
  const double to = arguments[2].toDouble();
  const c10::ScalarType type = target.local.scalar_type();
  const kernels::Uniform uniform = uniform_between(from, to);
  TESSERA_CHECK(holds(type, from) && holds(type, to) && holds(type, to - from),
                "uniform numbers from ", from, " to ", to, ": ", c10::toString(type),
                " cannot represent this range; pass finite bounds of a smaller range");
  fill_random(target.local, target.place, uniform, target.key);
}

void fill_normal(const RandomTarget& target, Arguments arguments) {
  check_is_floating(target, "normal_");
  fill_random(target.local, target.place,
              normal_with(arguments[1].toDouble(), arguments[2].toDouble()), target.key);
}

void fill_bernoulli(const RandomTarget& target, Arguments arguments) {
  refuse_complex(target, "bernoulli_");
  const kernels::Bernoulli bernoulli = bernoulli_of(arguments[1].toDouble());
  if (target.local.is_floating_point()) {
    return fill_random(target.local, target.place, bernoulli, target.key);
  }
  target.local.copy_(numbers(target, bernoulli, target.key));
}

void fill_exponential(const RandomTarget& target, Arguments arguments) {
  const double rate = arguments[1].toDouble();
  check_is_floating(target, "exponential_");
  TESSERA_CHECK(rate > 0.0, "exponential_: the rate is ", rate, "; pass a positive rate");
  target.local.copy_(uniform_numbers(target).log_().div_(-rate));
}

/// Fills a tensor with integers in [from, to), each computed from one uniform number of 53 bits.
void fill_integers(const RandomTarget& target, std::int64_t from, std::int64_t to) {
  refuse_complex(target, "random_");
  const auto first = static_cast<double>(from), last = static_cast<double>(to) - 1;
  const c10::ScalarType type = target.local.scalar_type();
  TESSERA_CHECK(from < to, "random_: from is ", from, " and to is ", to, "; pass from < to");
  TESSERA_CHECK(holds(type, first) && holds(type, last) && last - first < std::exp2(53),
                "random integers from ", from, " to ", to, ": ", c10::toString(type),
                " cannot represent the range, or it has more than 2^53 values; pass other bounds "
                "or another type");
  const at::Tensor steps = uniform_numbers(target).mul_(last - first + 1).floor_();
  target.local.copy_(steps.to(at::kLong).add_(from));
}

void fill_integers_to(const RandomTarget& target, Arguments arguments) {
  fill_integers(target, 0, arguments[1].toInt());
}

void fill_integers_from(const RandomTarget& target, Arguments arguments) {
  TESSERA_CHECK(!arguments[2].isNone(), "random_: from is ", arguments[1].toInt(),
                ", but there is no upper bound; pass the argument `to`");
  fill_integers(target, arguments[1].toInt(), arguments[2].toInt());
}

constexpr std::pair<std::string_view, RandomFill> kFills[] = {
    {"uniform_", &fill_uniform},           {"normal_", &fill_normal},
    {"bernoulli_.float", &fill_bernoulli}, {"exponential_", &fill_exponential},
    {"random_.to", &fill_integers_to},     {"random_.from", &fill_integers_from},
};

}  // namespace

RandomFill random_fill(std::string_view name) {
  for (const auto& [op, fill] : kFills) {
    if (op == name) {
      return fill;
    }
  }
  return nullptr;
}

RandomSourceScope::RandomSourceScope(at::Tensor source)
    : outer_(std::exchange(RankThread::here().random_source, std::move(source))) {}
RandomSourceScope::~RandomSourceScope() {
  RankThread::here().random_source = std::move(outer_);
}
const at::Tensor& random_source() {
  return RankThread::here().random_source;
}

}  // namespace detail

BatchPart::BatchPart(std::int64_t index, std::int64_t count) {
  TESSERA_CHECK(index >= 0 && index < count, "BatchPart: index is ", index, " and count is ", count,
                "; index must be from 0 to count - 1");
  scope_ = std::make_unique<detail::RandomRegionScope>(std::make_shared<detail::RandomRegion>(
      detail::random_region(), std::make_shared<detail::BatchRows>(index, count)));
}

BatchPart::~BatchPart() = default;

}  // namespace tessera
