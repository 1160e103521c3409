// Compares saving and loading a checkpoint with writing and reading plain files. The difference is
// the cost of checksums, several writers, and background saves.
//
//   bench_checkpoint DIR [MIB]     512 MiB of weights by default
//
// Files are read from the page cache and from disk. Figures are medians of five interleaved
// repetitions; a plain write or read uses one thread. The last test saves from four ranks, which
// are threads.

#include <ATen/ops/rand.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <exception>
#include <filesystem>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/dtensor/distributed_tensor.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/module.h"

namespace {

using namespace tessera;
namespace fs = std::filesystem;

constexpr std::int64_t kWidth = 2048;  // a 2048 x 2048 fp32 matrix has 16 MiB
constexpr std::int64_t kMib = 1 << 20;
constexpr int kRepetitions = 5;

class Matrices : public nn::Module<Matrices> {
 public:
  explicit Matrices(std::int64_t mib) {
    for (std::int64_t i = 0; i < std::max<std::int64_t>(1, mib / 16); ++i) {
      const auto matrix =
          std::make_shared<nn::Linear>(kWidth, kWidth, nn::LinearOptions{.bias = false});
      matrix->slot("weight")->set(at::rand({kWidth, kWidth}));
      register_module("matrix" + std::to_string(i), matrix);
    }
  }
};

struct Seconds {
  double passed = 0;
  double of_processor = 0;  ///< CPU seconds of all threads of the process
};

double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

Seconds seconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  const double processor = processor_seconds();
  work();
  return {std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(),
          processor_seconds() - processor};
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

double median_of(const std::vector<Seconds>& times, double Seconds::*which) {
  std::vector<double> values;
  for (const Seconds& time : times) {
    values.push_back(time.*which);
  }
  return median(values);
}

/// Returns the median time of each function in `works`. The functions run in turn, several times.
/// `prepare` runs before each function and is not timed.
std::map<std::string, Seconds> medians(
    const std::vector<std::pair<std::string, std::function<void()>>>& works,
    const std::function<void()>& prepare = [] {}) {
  std::map<std::string, std::vector<Seconds>> times;
  for (int i = 0; i < kRepetitions; ++i) {
    for (const auto& [name, work] : works) {
      prepare();
      times[name].push_back(seconds(work));
    }
  }
  std::map<std::string, Seconds> medians;
  for (const auto& [name, each] : times) {
    medians[name] = {median_of(each, &Seconds::passed), median_of(each, &Seconds::of_processor)};
  }
  return medians;
}

/// The baseline for writing: pwrite() of 1 MiB blocks, then fsync().
void write_plainly(const fs::path& path, std::int64_t mib) {
  const std::vector<char> bytes(kMib, 1);
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  for (std::int64_t i = 0; i < mib; ++i) {
    TESSERA_CHECK(pwrite(fd, bytes.data(), kMib, i * kMib) == kMib, "cannot write ", path.string());
  }
  fsync(fd);
  close(fd);
}

void read_plainly(const fs::path& folder, const std::vector<at::Tensor>& into) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const int fd = open(entry.path().c_str(), O_RDONLY);
    off_t offset = 0;
    for (const at::Tensor& tensor : into) {
      auto* bytes = static_cast<char*>(tensor.mutable_data_ptr());
      for (std::size_t i = 0; i < tensor.nbytes(); i += kMib) {
        offset += pread(fd, bytes + i, kMib, offset);
      }
    }
    close(fd);
  }
}

/// Drops the files from the page cache, so that the next read is from disk. All pages are already
/// written, because a save waits for the disk.
void drop_from_page_cache(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    const int fd = open(entry.path().c_str(), O_RDONLY);
    const int error = posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
    TESSERA_CHECK(error == 0, "cannot drop ", entry.path().string(), " from the page cache");
  }
}

std::vector<at::Tensor> tensors_of(const nn::ModuleBase& model) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, slot] : model.named_slots()) {
    tensors.push_back(slot->persistent());
  }
  return tensors;
}

void report(const char* what, std::int64_t mib, const Seconds& time, const Seconds& beside) {
  std::cout << fmt::format(
      "{:<28} {:8.0f} MiB/s {:6.2f} of the plain one {:6.3f} s of the processor a GiB\n", what,
      static_cast<double>(mib) / time.passed, beside.passed / time.passed,
      1024 * time.of_processor / static_cast<double>(mib));
}

void report_reading(const char* from, std::int64_t mib,
                    const std::map<std::string, Seconds>& times) {
  const Seconds& plain = times.at("plain");
  const Seconds& unchecked = times.at("unchecked");
  const Seconds& load = times.at("checked");
  std::cout << "from the " << from << ":\n";
  report("read", mib, plain, plain);
  report("load without checksums", mib, unchecked, plain);
  report("load", mib, load, plain);
  std::cout << fmt::format(
      "checksums are {:.1f} % of a load, {:.1f} % of its time of the processor\n",
      100 * (1 - unchecked.passed / load.passed),
      100 * (1 - unchecked.of_processor / load.of_processor));
}

void one_rank(const fs::path& dir, std::int64_t mib) {
  const auto world = comm::thread_worlds(1)[0];
  Matrices model(mib);
  const auto copied = [&] {
    std::vector<at::Tensor> made;
    for (const at::Tensor& tensor : tensors_of(model)) {
      made.push_back(tensor.clone());
    }
    return made;
  };
  const std::vector<at::Tensor> copies = copied();
  std::int64_t step = 0;
  std::vector<double> stalls;
  const auto writing = medians(
      {{"plain", [&] { write_plainly(dir / "plain", mib); }},
       {"save", [&] { checkpoint::save(*world, dir / "run", ++step, {model}, {.keep = 2}); }}});
  // copied() keeps all of its copies until it returns, so that no copy reuses memory. New memory is
  // slower, and async_save() also copies into new memory.
  const auto copying = medians(
      {{"copy", [&] { copied(); }},
       {"async", [&] {
          const auto begun = std::chrono::steady_clock::now();
          auto pending = checkpoint::async_save(*world, dir / "run", ++step, {model}, {.keep = 2});
          const std::chrono::duration<double> stall = std::chrono::steady_clock::now() - begun;
          stalls.push_back(stall.count());
          pending.wait();
        }}});
  // Makes the folder "unchecked", whose files are hard links to the files of the saved step. The
  // folder has no manifest, so the files are read without checksums.
  const fs::path checked = checkpoint::find_step(dir / "run");
  fs::create_directory(dir / "unchecked");
  for (const auto& entry : fs::directory_iterator(checked)) {
    if (entry.path().extension() == ".safetensors") {
      fs::create_hard_link(entry.path(), dir / "unchecked" / entry.path().filename());
    }
  }
  report("write", mib, writing.at("plain"), writing.at("plain"));
  report("save", mib, writing.at("save"), writing.at("plain"));
  std::cout << fmt::format("async_save stalls for {:.2f} copies\n",
                           median(stalls) / copying.at("copy").passed);
  const std::vector<std::pair<std::string, std::function<void()>>> reading{
      {"plain", [&] { read_plainly(dir / "unchecked", copies); }},
      {"unchecked", [&] { checkpoint::load(*world, dir / "unchecked", {model}); }},
      {"checked", [&] { checkpoint::load(*world, checked, {model}); }}};
  report_reading("page cache", mib, medians(reading));
  report_reading("disk", mib, medians(reading, [&] { drop_from_page_cache(dir / "unchecked"); }));
}

/// Saves on a 2 x 2 mesh, with half of the matrices replicated along the first dimension. Prints
/// how many bytes each of the writing ranks has written.
void four_ranks(const fs::path& dir, std::int64_t mib) {
  const auto worlds = comm::thread_worlds(4);
  std::vector<std::thread> ranks;
  for (const auto& world : worlds) {
    ranks.emplace_back([&, world] {
      const DeviceMesh mesh = init_device_mesh(world, {2, 2}, {"dp", "tp"});
      Matrices model(mib);
      bool sharded = false;
      for (const auto& [name, slot] : model.named_slots()) {
        const Placement first = (sharded = !sharded) ? Placement{Shard{0}} : Placement{Replicate{}};
        slot->set(distribute_tensor(at::ones({kWidth, kWidth}), mesh, {first, Shard{1}}));
      }
      checkpoint::save(*world, dir / "four", 1, {model});
    });
  }
  for (std::thread& rank : ranks) {
    rank.join();
  }
  std::map<std::string, std::uintmax_t> bytes;
  for (const auto& entry : fs::directory_iterator(dir / "four/step-00000001")) {
    if (entry.path().extension() == ".safetensors") {
      bytes[entry.path().filename().string().substr(0, 11)] += entry.file_size();
    }
  }
  std::uintmax_t all = 0;
  std::uintmax_t most = 0;
  for (const auto& [writer, of_writer] : bytes) {
    all += of_writer;
    most = std::max(most, of_writer);
  }
  const double mean = static_cast<double>(all) / static_cast<double>(bytes.size());
  std::cout << fmt::format("of {} writers none has more than {:.1f} % above the mean\n",
                           bytes.size(), 100 * (static_cast<double>(most) / mean - 1));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "bench_checkpoint DIR [MIB]\n";
    return 2;
  }
  try {
    const fs::path dir = fs::path(argv[1]) / ("bench-checkpoint-" + std::to_string(getpid()));
    fs::create_directories(dir);
    const std::int64_t mib = argc > 2 ? std::atoll(argv[2]) / 16 * 16 : 512;
    one_rank(dir, mib);
    four_ranks(dir, mib);
    fs::remove_all(dir);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "bench_checkpoint: " << error.what() << '\n';
    return 1;
  }
}
