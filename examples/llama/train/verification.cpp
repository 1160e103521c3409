// --verify: one sample of each data-parallel rank, forward and backward, beside one rank's model.

#include <cstdint>

#include "examples/llama/scalar_type.h"
#include "examples/llama/train/setup.h"
#include "examples/llama/train/trainer.h"

namespace llama {

using namespace tessera;

namespace {

observe::VerifyOptions verify_options(const DeviceMesh& mesh, const TrainOptions& o) {
  observe::VerifyOptions options{.batch_dims = batch_mesh(mesh).shape().names(),
                                 .splits_samples = o.cp > 1};
  if (o.cp > 1) {
    options.batch_dims.emplace_back("cp");
  }
  if (o.reduce_dtype == "bf16") {
    options.coarsest = c10::kBFloat16;
  }
  return options;
}

}  // namespace

/// Both losses of the sample are as training has them, or else the mean over all ranks would not be
/// one rank's.
void Trainer::verify() {
  const data::BatchLoader::Batch whole =
      data_.loader->load(position_.samples / options_.batch, first_row_, first_row_ + 1)
          .to(c10::Device(options_.device));
  const data::BatchLoader::Batch own = tokens_of_rank(*model_, whole);
  tensor_parallel::CrossEntropyOptions of_whole = loss_of_training(), of_own = of_whole;
  if (data_.loader->ignores_targets()) {
    of_whole.tokens = tensor_parallel::tokens_per_rank(whole.targets, batch_mesh(mesh_).flatten());
    of_own.tokens = tensor_parallel::tokens_per_rank(own.targets, data_mesh_);
  }
  begin_micro_batch(*model_, options_, options_.accumulate - 1);
  const std::shared_ptr<Llama> reference = make_reference(options_, config_);
  const observe::VerifyReport report = observe::verify(
      *model_, *reference, mesh_,
      [&](Llama& model) {
        const bool on_mesh = &model == model_.get();
        return loss_of_rows(model, options_, on_mesh ? own : whole, on_mesh ? of_own : of_whole);
      },
      verify_options(mesh_, options_));
  report.check();
  if (is_main()) {
    progress_->line(report.text());
  }
}

}  // namespace llama
