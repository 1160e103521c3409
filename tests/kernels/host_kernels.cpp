// Runs CUDA kernel bodies on the CPU in loops. If GPU threads share a row, the body runs for three
// threads in turn, or for one thread if threads exchange results.
#include "kernels/host_kernels.h"

#include <c10/util/Exception.h>

#include <tuple>

#include "cuda_kernels.h"
#include "device/adamw.h"
#include "device/cross_entropy.h"
#include "device/embedding.h"
#include "device/lists.h"
#include "device/quantize_fp8.h"
#include "device/rms_norm.h"
#include "device/rotary.h"
#include "device/silu_mul.h"
#include "tessera/kernels/fake_mode.h"

namespace tessera::kernels {
namespace {

constexpr int kShares = 3;

struct OneThread {
  static std::int64_t first() { return 0; }
  static std::int64_t width() { return 1; }
  template <class T>
  static T max(T x) {
    return x;
  }
  template <class T>
  static T sum(T x) {
    return x;
  }
};

struct OneOfSeveral {
  std::int64_t number;
  std::int64_t first() const { return number; }
  static std::int64_t width() { return kShares; }
};

template <class Body>
void for_shares(std::int64_t rows, const Body& body) {
  for (std::int64_t row = 0; row < rows; ++row) {
    for (int thread = 0; thread < kShares; ++thread) {
      body(row, thread);
    }
  }
}

template <class Body>
void with_weight(const RmsNorm& call, Element type, bool aligned, const Body& body) {
  with_vectors(type, aligned, [&]<class T, int N>() {
    if (call.weight_is_float) {
      body.template operator()<T, float, N>();
    } else {
      body.template operator()<T, T, N>();
    }
  });
}

void launch(const RmsNorm& call, Element type) {
  with_weight(call, type, is_aligned(call, type), [&]<class T, class W, int N>() {
    OneThread team;
    for (std::int64_t row = 0; row < call.rows; ++row) {
      rms_norm_row<T, W, N, 2>(call, row, team);
    }
  });
}

void launch(const RmsNormBackward& call, Element type) {
  const RmsNorm& in = call.forward;
  with_weight(in, type, is_aligned(call, type), [&]<class T, class W, int N>() {
    OneThread team;
    const std::int64_t blocks = rms_norm_blocks(in.rows, in.size);
    for (std::int64_t block = 0; block < blocks; ++block) {
      float* const sums = call.weight_grad != nullptr ? call.terms + block * in.size : nullptr;
      if (sums != nullptr) {
        std::fill_n(sums, in.size, 0.0F);
      }
      for (std::int64_t row = block; row < in.rows; row += blocks) {
        rms_norm_backward_row<T, W, N>(call, row, sums, team);
      }
    }
    for (std::int64_t i = 0; call.weight_grad != nullptr && i < in.size; ++i) {
      static_cast<W*>(call.weight_grad)[i] =
          static_cast<W>(sum_of_terms(call.terms, blocks, in.size, i, /*first=*/0, /*step=*/1));
    }
  });
}

void launch(const SiluMul& call, Element type) {
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
    for_shares(call.rows, [&](std::int64_t row, int thread) {
      silu_mul_row<T, N>(call, row, thread, kShares);
    });
  });
}

void launch(const SiluMulBackward& call, Element type) {
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
    for_shares(call.forward.rows, [&](std::int64_t row, int thread) {
      silu_mul_backward_row<T, N>(call, row, thread, kShares);
    });
  });
}

void launch(const Rotary& call, Element type) {
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
    for (std::int64_t position = 0; position < call.batch * call.sequence; ++position) {
      for (int thread = 0; thread < 6; ++thread) {
        rotate_position<T, N>(call, position,
                              {.first_vector = thread % 2,
                               .vector_step = 2,
                               .first_head = thread / 2,
                               .head_step = 3});
      }
    }
  });
}

void launch(const Embedding& call, Element type) {
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
    for_shares(call.count,
               [&](std::int64_t i, int thread) { embedding_row<T, N>(call, i, thread, kShares); });
  });
}

void launch(const EmbeddingBackward& call, Element type) {
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
    const std::int64_t tiles = embedding_tiles(call.count);
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      for (std::int64_t i = 0; i < call.size; i += N) {
        embedding_backward_tile<T, N>(call, tile, i);
      }
    }
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      for (std::int64_t i = 0; i < call.size; i += N) {
        embedding_backward_row<T, N>(call, tile, i);
      }
    }
  });
}

void launch(const CheckIndices& call) {
  for (std::int64_t i = 0; i < call.count; ++i) {
    TORCH_CHECK(call.is_right(i), "index ", call.indices[i]);
  }
}

void launch(const CrossEntropy& call, Element type) {
  const bool reads = call.step == CrossEntropyStep::kWhole || call.step == CrossEntropyStep::kTerms;
  with_vectors(type, /*aligned=*/true, [&]<class T, int N>() {
    OneThread team;
    for (std::int64_t row = 0; row < call.logits.rows; ++row) {
      if (reads) {
        write_sums<T>(call, row, sums_of_row<T, N>(call.logits, row, team));
      } else {
        finish_row(call, row);
      }
    }
  });
}

void launch(const CrossEntropyBackward& call, Element type) {
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
    for_shares(call.logits.rows, [&](std::int64_t row, int thread) {
      cross_entropy_backward_row<T, N>(call, row, OneOfSeveral{thread});
    });
  });
}

void launch(const Scale& call, Element type) {
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
    for (int thread = 0; thread < kShares; ++thread) {
      if (call.x_is_float) {
        scale_elements<float, T, N>(call, thread, kShares);
      } else {
        scale_elements<T, T, N>(call, thread, kShares);
      }
    }
  });
}

void launch(const Pack& call, Element from) {
  with_type(from, [&]<class From>() {
    with_type(call.to, [&]<class To>() {
      for_shares(call.list.chunks, [&](std::int64_t chunk, int thread) {
        copy_chunk<From, To>(call, static_cast<std::int32_t>(chunk), thread, kShares);
      });
    });
  });
}

void launch(const SquareSums& call, Element type) {
  with_type(type, [&]<class T>() {
    std::fill_n(call.sums, call.list.chunks, 0.0);
    for_shares(call.list.chunks, [&](std::int64_t chunk, int thread) {
      call.sums[chunk] +=
          squares_of_chunk<T>(call, static_cast<std::int32_t>(chunk), thread, kShares);
    });
  });
}

void launch(const SumKinds& call) {
  OneThread team;
  sum_kinds(call, team);
}

void launch(const ClipNorm& call) {
  clip_norm(call);
}

template <class M>
void update_chunks(const AdamW& call) {
  for_shares(call.list.chunks, [&](std::int64_t number, int thread) {
    const Chunk chunk = chunk_of(call.list, static_cast<std::int32_t>(number));
    const AdamWPiece& piece = call.list.pieces[chunk.piece];
    adamw_chunk<M>(piece, factors_of(call, piece), chunk, thread, kShares);
  });
}

void launch(const AdamW& call, Element moments) {
  moments == Element::kFloat ? update_chunks<float>(call) : update_chunks<c10::BFloat16>(call);
}

void launch(const QuantizeFp8& call, Element type) {
  with_vectors(type, is_aligned(call, type), [&]<class T, int N>() {
    OneThread team;
    for (std::int64_t row = 0; row < call.rows; ++row) {
      quantize_fp8_row<T, N>(call, row, team);
    }
  });
}

template <class Call>
void run(const Call& call, const at::Tensor& like) {
  if constexpr (requires { launch(call); }) {
    launch(call);
  } else {
    launch(call, element_of(like));
  }
}

template <class... Calls>
std::tuple<DeviceKernel<Calls>...> runs_of(const std::tuple<DeviceKernel<Calls>...>&) {
  return {&run<Calls>...};
}

}  // namespace

KernelsOnHost::KernelsOnHost() {
  [[maybe_unused]] static const bool registered = [] {
    register_cuda_kernels({.fill_random = nullptr,
                           .dropout = nullptr,
                           .device = runs_of(decltype(CudaKernels::device)())});
    return true;
  }();
  // While any thread has a FakeMode, the library treats CPU tensors in all threads as CUDA tensors.
  std::promise<void> begun;
  thread_ = std::thread([this, &begun] {
    const FakeMode mode(c10::DeviceType::CUDA);
    begun.set_value();
    end_.get_future().wait();
  });
  begun.get_future().wait();
}

KernelsOnHost::~KernelsOnHost() {
  end_.set_value();
  thread_.join();
}

}  // namespace tessera::kernels
