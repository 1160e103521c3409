#include "examples/bench_mfu/bench.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <sstream>
#include <utility>

#include "examples/llama/cli.h"
#include "tessera/core/error.h"

namespace bench {

using llama::number_above_0;

namespace {

void declare(CLI::App& app, BenchOptions& o) {
  app.option_defaults()->group("model");
  app.add_option("--config", o.configs, "Shapes: config.json files of models")
      ->delimiter(',')
      ->option_text("FILE[,FILE]")
      ->transform(llama::hub_name(tessera::HubItem::kConfig));
  app.add_option("--shape", o.shapes,
                 "Shapes with published figures, which are printed beside ours; their --seq, and "
                 "their --batch on each rank, unless given")
      ->delimiter(',')
      ->check(CLI::IsMember(shape_names()));
  app.option_defaults()->group("parallelism");
  app.add_option("--ac", o.ac, "Activation checkpointing: none, selective, full, auto (none)")
      ->delimiter(',')
      ->check(CLI::IsMember({"none", "full", "selective", "auto"}));
  app.add_option("--mesh", o.meshes,
                 "Degrees of FSDP and of tensor parallelism (1x1), or DPxCPxTP: of context "
                 "parallelism between them")
      ->delimiter(',')
      ->option_text("DPxTP[,DPxTP]");
  app.option_defaults()->group("training");
  app.add_option("--batch", o.batches, "Sequences a step over all ranks (4, or the shape's)")
      ->delimiter(',')
      ->option_text("N[,N]")
      ->check(number_above_0());
  app.add_option("--seq", o.seq, "Tokens a sequence (128, or the shape's)")
      ->check(number_above_0());
  app.add_option("--steps", o.steps, "Steps of each run (6)")->check(number_above_0());
  app.add_option("--warmup", o.warmup, "The first of --steps, which are not measured (2)")
      ->check(llama::number_of_at_least_0());
  app.add_option("--device", o.device, "cpu or cuda (cpu)")->check(CLI::IsMember({"cpu", "cuda"}));
  app.option_defaults()->group("metrics");
  app.add_option(
         "--peak-flops", o.peak_flops,
         "What MFU is against: FLOP/s of a device, or measure: by matrix products (measure)")
      ->option_text("X|measure");
  app.add_option("--flags", o.flags,
                 "More flags of llama_train, for every run: --flags=\"--param-dtype bf16\"")
      ->delimiter(' ')
      ->option_text("\"FLAG ...\"");
  app.add_option("--peer", o.peer,
                 "Measure PyTorch's step on the same tokens too: eager, compiled, and compiled "
                 "without FSDP, "
                 "by benchmarks/peer/torch_step.py and python3. For runs of one rank, with --ac "
                 "none or full")
      ->option_text("FILE");
  app.add_option("--out", o.out, "Folder of the runs and results.json (bench_mfu)")
      ->option_text("DIR");
}

/// The numbers in a mesh such as "2x1", in order; 0 for a text that is not a number.
std::vector<std::int64_t> numbers_of(const std::string& mesh) {
  std::vector<std::int64_t> numbers;
  std::istringstream parts(mesh);
  for (std::string part; std::getline(parts, part, 'x');) {
    std::int64_t number = 0;
    const auto read = std::from_chars(part.data(), part.data() + part.size(), number);
    numbers.push_back(read.ec == std::errc() && read.ptr == part.data() + part.size() ? number : 0);
  }
  return numbers;
}

Degrees degrees_of(const std::string& mesh) {
  const std::vector<std::int64_t> degrees = numbers_of(mesh);
  const bool positive =
      std::ranges::all_of(degrees, [](std::int64_t degree) { return degree > 0; });
  TESSERA_CHECK(positive && (degrees.size() == 2 || degrees.size() == 3) && !mesh.ends_with('x'),
                "--mesh ", mesh, " is no mesh; give degrees as DPxTP, such as 2x1, or as DPxCPxTP");
  return {.dp = degrees.front(), .cp = degrees.size() == 3 ? degrees[1] : 1, .tp = degrees.back()};
}

void check_outputs(const BenchOptions& o) {
  std::vector<llama::NamedFile> files;
  for (const std::string& config : o.configs) {
    files.push_back({"--config", config, /*is_read=*/true});
  }
  for (const std::string& name : o.shapes) {
    files.push_back({"config.json of --shape " + name, config_of_shape(o, name).string()});
  }
  files.push_back({"--peer", o.peer, /*is_read=*/true});
  files.push_back({"results.json of --out", o.out + "/results.json"});
  llama::check_files_differ(files);
}

}  // namespace

BenchOptions parse_bench_options(std::vector<std::string> arguments) {
  BenchOptions o;
  CLI::App app(
      "Trains each combination of shapes, meshes, activation checkpointing and batches for a few "
      "steps by llama_train, and shows MFU in three conventions, tokens a second and memory.",
      "bench_mfu");
  declare(app, o);
  llama::parse_command_line(app, std::move(arguments));
  TESSERA_CHECK(!o.configs.empty() || !o.shapes.empty(),
                "no shape is given; pass --config FILE or --shape NAME");
  TESSERA_CHECK(o.warmup < o.steps, "--warmup ", o.warmup, " leaves none of --steps ", o.steps,
                "; give more steps");
  TESSERA_CHECK(o.peer.empty() || o.flags.empty(),
                "--peer makes the step without --flags; leave one of them out");
  TESSERA_CHECK(o.peer.empty() || std::filesystem::is_regular_file(o.peer), "--peer ", o.peer,
                " is no file; give benchmarks/peer/torch_step.py");
  check_outputs(o);
  return o;
}

std::string Trial::shape() const {
  const std::string name = config.stem().string();
  return name == "config" && config.has_parent_path() ? config.parent_path().filename().string()
                                                      : name;
}

std::filesystem::path config_of_shape(const BenchOptions& options, const std::string& name) {
  return std::filesystem::path(options.out) / "shapes" / (name + ".json");
}

std::vector<Trial> trials_of(const BenchOptions& o) {
  std::vector<Trial> trials;
  const auto add = [&](const std::filesystem::path& config, std::int64_t seq,
                       const auto& batches_of) {
    for (const std::string& text : o.meshes) {
      const Degrees mesh = degrees_of(text);
      for (const std::string& ac : o.ac) {
        for (const std::int64_t batch : o.batches.empty() ? batches_of(mesh) : o.batches) {
          trials.push_back({.config = config,
                            .ac = ac,
                            .batch = batch,
                            .seq = o.seq > 0 ? o.seq : seq,
                            .mesh = mesh});
        }
      }
    }
  };
  for (const std::string& config : o.configs) {
    add(config, 128, [](const Degrees&) { return std::vector<std::int64_t>{4}; });
  }
  for (const std::string& name : o.shapes) {
    const Shape& shape = shape_of(name);
    add(config_of_shape(o, name), shape.seq,
        [&](const Degrees& mesh) { return std::vector<std::int64_t>{shape.batch * mesh.ranks()}; });
  }
  return trials;
}

}  // namespace bench
