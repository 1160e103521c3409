// verify(): every rank runs the reference with its own samples. Of the reference's results, only
// the mean of the gradients is communicated.
#include "tessera/observe/verify.h"
#include "tessera/comm/detail/agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string_view>

#include "tessera/comm/agreement.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/detail/replica_agreement.h"
#include "tessera/dtensor/detail/transfers.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/detail/records.h"
#include "tessera/nn/initialization.h"
#include "verify_parts.h"

namespace tessera::observe {
namespace {

/// Offset between the random-operator counts of the verification runs and of the program. FSDP
/// assumes that a model draws no random numbers if the counts do not change between two forwards,
/// so the runs must not repeat the program's counts.
constexpr std::uint64_t kAhead = std::uint64_t{1} << 32;

/// Number of runs with perturbed weights. A single perturbation may by chance change a value very
/// little.
constexpr std::uint64_t kDraws = 2;

/// Tells random operators which part of the whole batch the rows of this rank are, while the
/// returned object exists.
BatchPart part_of_batch(const DeviceMesh& mesh, const VerifyOptions& options) {
  if (options.batch_dims.empty()) {
    return {0, 1};
  }
  const DeviceMesh batches = mesh.slice(options.batch_dims).flatten();
  return {batches.local_rank(), batches.size()};
}

class Verification {
 public:
  Verification(nn::ModuleBase& module, nn::ModuleBase& reference, const DeviceMesh& mesh,
               const VerifyStep& step, const VerifyOptions& options)
      : module_(module), reference_(reference), mesh_(mesh), step_(step), options_(options) {}

  VerifyReport run() {
    on_each_rank([&] {
      nn::check_initialized(module_, "verify");
      check_reference(module_, reference_);
    });
    copy_to_reference(module_, reference_, mesh_);
    if (std::string weights = whether_weights_are_equal(); !weights.empty()) {
      return {.weights = std::move(weights)};
    }
    const SavedState saved(module_);
    counts_ = draw_counts(module_);
    on_each_rank([&] {
      try {
        run_reference();
      } catch (const Error& error) {
        fail("verify: with the reference, ", error.what());
      }
    });
    check_rows();
    const SeenRun on_mesh = run_on_mesh();
    return compare(on_mesh, one_rank_, noise_, mesh_, options_);
  }

 private:
  void on_each_rank(const std::function<void()>& work) const {
    comm::run_or_fail_together(flush_pending_transfers(mesh_.group_of_all_ranks()), mesh_.device(),
                               work);
  }

  /// Describes the first weight that differs between ranks; empty if there is none.
  std::string whether_weights_are_equal() const {
    const auto check = [](const DeviceMesh& among, const char* kind, const nn::NamedSlots& slots) {
      std::vector<tessera::detail::Replica> copies;
      for (const auto& [fqn, slot] : slots) {
        copies.push_back({std::string(kind) + " '" + fqn + "'", slot->get().detach()});
      }
      tessera::detail::check_replicas(tessera::detail::peers_of(among), copies,
                                      tessera::detail::Equality::kBitwise, "verify",
                                      "give every rank the same values");
    };
    std::string problem;
    try {
      check(mesh_, "parameter", reference_.named_slots());
      // Only ranks with the same samples are compared, because buffers of a batch norm depend on
      // the samples.
      if (const auto dims = other_dims(mesh_, options_.batch_dims); !dims.empty()) {
        check(mesh_.slice(dims), "buffer", reference_.named_buffer_slots());
      }
    } catch (const comm::PeerError&) {
      throw;
    } catch (const Error& error) {
      problem = error.what();
    }
    return problem_of_first_rank(problem);
  }

  /// Returns the problem of the first rank that has found a problem. Ranks with other samples may
  /// have found another problem, or none.
  std::string problem_of_first_rank(const std::string& own) const {
    comm::Communicator& group = flush_pending_transfers(mesh_.group_of_all_ranks());
    const auto failure =
        comm::first_failure(group, mesh_.device(), [&] { TESSERA_CHECK(own.empty(), own); });
    return failure ? failure->message : "";
  }

  void run_reference() {
    // Losses read the number of data-parallel ranks from the last forward; the reference runs on
    // one rank.
    nn::set_batch_ranks(1);
    const auto run = [&] {
      set_draw_counts(reference_, counts_, kAhead);
      const BatchPart part = part_of_batch(mesh_, options_);
      return run_step(reference_, step_);
    };
    one_rank_ = run();
    draws_ = have_drawn(draw_counts(reference_), counts_, kAhead);
    for (std::uint64_t draw = 0; draw < kDraws; ++draw) {
      change_last_places(reference_, draw);
      raise_noise(noise_, one_rank_, run());
    }
  }

  /// Checks that each rank's rows follow the rows of lower ranks, because random numbers are
  /// indexed by row.
  void check_rows() const {
    comm::Communicator& group = flush_pending_transfers(mesh_.group_of_all_ranks());
    const auto all = comm::gather_values(group, mesh_.device(), {one_rank_.rows, draws_ ? 1 : 0});
    const auto other =
        std::ranges::find_if(all, [&](const auto& each) { return each[0] != all.front()[0]; });
    const bool draws = std::ranges::any_of(all, [](const auto& each) { return each[1] != 0; });
    TESSERA_CHECK(!draws || other == all.end(), "verify: the model draws random numbers, and rank ",
                  mesh_.ranks().front(), " gives it ", all.front()[0], " rows, but rank ",
                  mesh_.ranks()[static_cast<std::size_t>(other - all.begin())], " ", (*other)[0],
                  "; give it equally many on each, or verify in evaluation mode");
  }

  SeenRun run_on_mesh() {
    try {
      set_draw_counts(module_, counts_, draws_ ? kAhead : 0);
      const BatchPart part = part_of_batch(mesh_, options_);
      return run_step(module_, step_);
    } catch (const comm::PeerError&) {
      throw;
    } catch (const Error& error) {
      fail("verify: on the mesh, ", error.what());
    }
  }

  nn::ModuleBase& module_;
  nn::ModuleBase& reference_;
  const DeviceMesh& mesh_;
  const VerifyStep& step_;
  const VerifyOptions& options_;
  DrawCounts counts_;
  bool draws_ = false;  ///< whether the reference draws random numbers
  SeenRun one_rank_;
  Noise noise_;
};

}  // namespace

VerifyReport verify(nn::ModuleBase& module, nn::ModuleBase& reference, const DeviceMesh& mesh,
                    const VerifyStep& step, const VerifyOptions& options) {
  return Verification(module, reference, mesh, step, options).run();
}

namespace {

/// Limits the printed differences: later ones usually follow from the first ones.
constexpr std::size_t kLines = 8;

std::string counted(std::size_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::string equal_line(const VerifyReport& report) {
  std::string compared = report.modules > 0 ? counted(report.modules, "module") : "the loss";
  if (report.parameters > 0) {
    compared += " and " + counted(report.parameters, "parameter");
  }
  return fmt::format(
      "verify: {} equal one rank's (largest difference {:.2g} of the largest value{})", compared,
      report.largest,
      report.modules > 0 ? "" : "; outputs are not compared, since ranks split the samples");
}

/// Advice for the user on where to look for the cause of the first difference.
std::string remedy(const VerifyReport& report) {
  if (!report.cause.empty()) {
    return report.cause;
  }
  return fmt::format(
      "{}so look at what computes this gradient: a to_local() or full_tensor() without "
      "Placements{{Partial{{}}}} where each rank's gradient is one term of a sum, the backward of "
      "your own function, a hook, the parameter's placement in the plan",
      report.modules > 0
          ? "all outputs, and the gradients that backward computes before, are equal, "
          : "the loss, and the gradients that backward computes before, are equal, ");
}

std::string first_line(const VerifyReport& report) {
  if (!report.weights.empty()) {
    return report.weights;
  }
  const bool of_output = !report.outputs.empty();
  const VerifyDifference& first = of_output ? report.outputs.front() : report.gradients.front();
  std::string line = fmt::format("verify: the {}; {}", first.text, remedy(report));
  const std::size_t outputs = report.outputs.size() - (of_output ? 1 : 0);
  const std::size_t gradients = report.gradients.size() - (of_output ? 0 : 1);
  if (outputs + gradients > 0) {
    line += fmt::format(" ({} and {} more differ)", counted(outputs, "output"),
                        counted(gradients, "gradient"));
  }
  return line;
}

void add_lines(std::string& text, const std::vector<VerifyDifference>& differences,
               std::size_t from) {
  const std::size_t end = std::min(differences.size(), from + kLines);
  for (std::size_t i = from; i < end; ++i) {
    text += "\n  the " + differences[i].text;
  }
  if (end < differences.size()) {
    text += fmt::format("\n  and {} more", differences.size() - end);
  }
}

}  // namespace

std::string VerifyReport::text() const {
  if (ok()) {
    return equal_line(*this);
  }
  std::string text = first_line(*this);
  add_lines(text, outputs, 1);
  add_lines(text, gradients, outputs.empty() ? 1 : 0);
  return text;
}

void VerifyReport::check() const {
  TESSERA_CHECK(ok(), first_line(*this));
}

}  // namespace tessera::observe
