// Saves, at once and in the background.

#include <ATen/core/grad_mode.h>

#include <chrono>
#include <utility>

#include "all_ranks.h"
#include "save/background_save.h"
#include "save/prepare_save.h"
#include "save/save_step.h"
#include "tessera/checkpoint/async_save.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/trace.h"

namespace tessera::checkpoint {

SaveFuture::SaveFuture(std::shared_ptr<BackgroundSave> save, double stall_seconds)
    : save_(std::move(save)), stall_seconds_(stall_seconds) {}

bool SaveFuture::done() const {
  return save_ == nullptr || save_->done();
}

void SaveFuture::wait() {
  if (save_ != nullptr) {
    save_->wait();
  }
}

void save(comm::World& world, const std::filesystem::path& dir, std::int64_t step,
          const StateDict& state, const SaveOptions& options) {
  const comm::CallerScope caller("checkpoint::save");
  const at::NoGradGuard no_grad;
  const comm::CommunicatorPtr hosts = hosts_of_saves(world);
  end_save_under_way(*hosts);
  save_step(*hosts, prepare_save(*hosts, dir, step, state, options));
}

SaveFuture async_save(comm::World& world, const std::filesystem::path& dir, std::int64_t step,
                      const StateDict& state, const SaveOptions& options) {
  const auto begun = std::chrono::steady_clock::now();
  const comm::CallerScope caller("checkpoint::async_save");
  const at::NoGradGuard no_grad;
  const comm::CommunicatorPtr hosts = hosts_of_saves(world);
  end_save_under_way(*hosts);
  auto save = begin_save(hosts, prepare_save(*hosts, dir, step, state, options));
  const std::chrono::duration<double> stall = std::chrono::steady_clock::now() - begun;
  return {std::move(save), stall.count()};
}

}  // namespace tessera::checkpoint
