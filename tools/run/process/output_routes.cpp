#include "output_routes.h"

#include <utility>

namespace tessera::run {

OutputRoutes::OutputRoutes(const Options& options, const LogFolder& logs, int start,
                           OutputSink& out, LineMerger& errors)
    : options_(&options.logs),
      logs_(&logs),
      start_(start),
      first_rank_(options.first_rank()),
      out_(&out),
      errors_(&errors) {}

bool OutputRoutes::has_own_stdout(int local_rank) const {
  return first_rank_ + local_rank == 0 && shows_out(local_rank) &&
         !options_->tee.has_out(local_rank);
}

LineRelay::TakeLine OutputRoutes::out(int local_rank) {
  LineRelay::TakeLine show;
  if (shows_out(local_rank)) {
    const int rank = first_rank_ + local_rank;
    const std::string prefix = rank == 0 ? "" : "[rank " + std::to_string(rank) + "] ";
    show = [this, prefix](const std::string& line) { out_->add(prefix + line + "\n"); };
  }
  return join(logs_->out(start_, local_rank), std::move(show));
}

LineRelay::TakeLine OutputRoutes::err(int local_rank) {
  LineRelay::TakeLine show;
  if (shows_err(local_rank)) {
    show = [this, rank = first_rank_ + local_rank](const std::string& line) {
      errors_->add(rank, line);
    };
  }
  return join(logs_->err(start_, local_rank), std::move(show));
}

std::vector<OutputSink*> OutputRoutes::sinks() {
  std::vector<OutputSink*> sinks;
  for (RankLog& file : files_) {
    sinks.push_back(&file.sink());
  }
  return sinks;
}

std::vector<std::string> OutputRoutes::losses() const {
  std::vector<std::string> losses;
  for (const RankLog& file : files_) {
    if (const std::string loss = file.loss(); !loss.empty()) {
      losses.push_back(loss);
    }
  }
  return losses;
}

// As with torchrun, what is both redirected and copied is shown.
bool OutputRoutes::shows_out(int local_rank) const {
  return is_shown(local_rank) &&
         (!options_->redirects.has_out(local_rank) || options_->tee.has_out(local_rank));
}

bool OutputRoutes::shows_err(int local_rank) const {
  return is_shown(local_rank) &&
         (!options_->redirects.has_err(local_rank) || options_->tee.has_err(local_rank));
}

bool OutputRoutes::is_shown(int local_rank) const {
  return options_->shown.empty() || options_->shown.contains(local_rank);
}

LineRelay::TakeLine OutputRoutes::join(std::optional<RankLog> log, LineRelay::TakeLine show) {
  RankLog* file = log ? &files_.emplace_back(std::move(*log)) : nullptr;
  return [file, show = std::move(show)](const std::string& line) {
    if (file != nullptr) {
      file->add(line);
    }
    if (show) {
      show(line);
    }
  };
}

}  // namespace tessera::run
