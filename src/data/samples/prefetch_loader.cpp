#include "tessera/data/prefetch_loader.h"

#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>

#include <utility>

namespace tessera::data {
namespace {

/// The calling thread's GPU: a guard without an index changes nothing.
c10::Device current_gpu() {
  return c10::DeviceGuard(c10::Device(c10::kCUDA)).original_device();
}

}  // namespace

PrefetchLoader::PrefetchLoader(std::shared_ptr<const BatchLoader> loader, std::int64_t first,
                               std::int64_t last, bool pinned, bool beside)
    : PrefetchLoader(std::move(loader), {RowRange{first, last}}, pinned, beside) {}

PrefetchLoader::PrefetchLoader(std::shared_ptr<const BatchLoader> loader,
                               std::vector<RowRange> ranges, bool pinned, bool beside)
    : loader_(std::move(loader)), ranges_(std::move(ranges)), pinned_(pinned), beside_(beside) {}

void PrefetchLoader::begin(std::int64_t step) {
  step_ = step;
  // A thread begins on the first GPU, where page-locked memory would make another context.
  const c10::Device device = pinned_ ? current_gpu() : c10::Device(c10::kCPU);
  // A copy of all that it needs: this object may be moved meanwhile.
  batch_ = std::async(beside_ ? std::launch::async : std::launch::deferred,
                      [loader = loader_, ranges = ranges_, pinned = pinned_, step, device] {
                        const c10::DeviceGuard guard(device);
                        return loader->load(step, ranges, pinned);
                      });
  if (!beside_) {
    batch_.wait();  // computes it
  }
}

BatchLoader::Batch PrefetchLoader::load(std::int64_t step) {
  RECORD_USER_SCOPE("load batch");
  if (step != step_) {
    begin(step);
  }
  // If get() throws, the next call starts again.
  step_ = -1;
  BatchLoader::Batch batch = batch_.get();
  begin(step + 1);
  return batch;
}

}  // namespace tessera::data
