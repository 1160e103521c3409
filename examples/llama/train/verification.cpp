
#include "examples/llama/scalar_type.h"
#include "examples/llama/train/llama_run.h"
#include "examples/llama/train/setup.h"

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
std::string verify(LlamaRun& run) {
  const data::BatchLoader::Batch whole =
      run.data.loader
          ->load(run.state.samples / run.options.batch, run.rows.front().first,
                 run.rows.front().first + 1)
          .to(c10::Device(run.options.device));
  const data::BatchLoader::Batch own = tokens_of_rank(*run.model, whole);
  tensor_parallel::CrossEntropyOptions of_whole = run.loss_options(), of_own = of_whole;
  if (run.data.loader->ignores_targets()) {
    of_whole.tokens = tensor_parallel::tokens_per_rank(whole.targets, run.batch_ranks);
    of_own.tokens = tensor_parallel::tokens_per_rank(own.targets, run.data_ranks);
  }
  const std::shared_ptr<Llama> reference = make_reference(run.options, run.config);
  const observe::VerifyReport report = observe::verify(
      *run.model, *reference, run.mesh,
      [&](Llama& model) {
        const bool on_mesh = &model == run.model.get();
        return loss_of_rows(model, run.options, on_mesh ? own : whole, on_mesh ? of_own : of_whole);
      },
      verify_options(run.mesh, run.options));
  report.check();
  return report.text();
}

}  // namespace llama
