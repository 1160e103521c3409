#include <ATen/TensorOperators.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/eye.h>

#include <utility>

#include "rule_cases.h"
#include "tessera/dtensor/detail/fused_operators.h"

namespace tessera::testing {
namespace {

std::vector<RuleCase> matmul_cases() {
  return {
      row("mm", reals({7, 5}), reals({5, 6})),
      row("bmm", reals({3, 7, 5}), reals({3, 5, 2})),
      row("mv", reals({7, 5}), reals({5})),
      row("dot", reals({7}), units({7})),
      row("addmm", reals({6}), reals({7, 5}), reals({5, 6}), 0.5, 2),
      row("addmm", reals({7, 6}), reals({7, 5}), reals({5, 6})),
      row("addmm", reals({7, 1}), reals({7, 5}), reals({5, 6})),
      row("addmm_", reals({7, 6}), reals({7, 5}), reals({5, 6})),
      row("addmv", reals({7}), reals({7, 5}), reals({5})),
      row("addr", reals({7, 5}), reals({7}), reals({5})),
      row("baddbmm", reals({3, 7, 2}), reals({3, 7, 5}), reals({3, 5, 2})),
      row("addbmm", reals({7, 2}), reals({3, 7, 5}), reals({3, 5, 2})),
      row("linear", reals({2, 7, 5}), reals({6, 5}), reals({6})),
      row("linear", reals({7, 5}), reals({6, 5})),
      row("matmul", reals({2, 7, 5}), reals({5, 6})),
      row("matmul", reals({5}), reals({3, 5, 6})),
      row("matmul", reals({4, 1, 7, 5}), reals({3, 5, 6})),
      row("mm.out", reals({7, 5}), reals({5, 6}), reals({7, 6})),
  };
}

std::vector<RuleCase> loss_cases() {
  std::vector<RuleCase> cases;
  for (std::int64_t reduction : {0, 1, 2}) {
    for (const char* op : {"mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"}) {
      cases.push_back(row(op, reals({7, 5}), units({7, 5}), reduction));
    }
    cases.push_back(
        row("binary_cross_entropy", units({7, 5}), units({7, 5}), units({5}), reduction));
    cases.push_back(row("binary_cross_entropy_with_logits", reals({7, 5}), units({7, 5}),
                        c10::IValue(), units({5}), reduction));
    const auto grad = reduction == 0 ? reals({7, 5}) : reals({});
    cases.push_back(row("mse_loss_backward", grad, reals({7, 5}), units({7, 5}), reduction));
    cases.push_back(
        row("smooth_l1_loss_backward", grad, reals({7, 5}), units({7, 5}), reduction, 0.4));
    cases.push_back(row("huber_loss_backward", grad, reals({7, 5}), units({7, 5}), reduction, 0.4));
    cases.push_back(row("binary_cross_entropy_backward", grad, units({7, 5}), units({7, 5}),
                        c10::IValue(), reduction));
    cases.push_back(
        row("nll_loss_forward", reals({7, 5}), indices({7}, 5), units({5}), reduction, 2));
    cases.push_back(
        row("nll_loss_forward", reals({7, 5}), indices({7}, 5), c10::IValue(), reduction, -100));
    cases.push_back(row("nll_loss_backward", reduction == 0 ? reals({7}) : reals({}), reals({7, 5}),
                        indices({7}, 5), units({5}), reduction, 2, units({}) + 3.0));
    cases.push_back(row("nll_loss2d_forward", reals({2, 5, 3, 4}), indices({2, 3, 4}, 5),
                        c10::IValue(), reduction, 1));
  }
  return cases;
}

std::vector<RuleCase> norm_cases() {
  const auto statistics = [] { return units({2, 7, 1}); };
  const c10::List<bool> all({true, true, true});
  return {
      row("native_layer_norm", reals({2, 7, 5}), Ints{5}, units({5}), reals({5}), 1e-5),
      row("native_layer_norm", reals({7, 5}), Ints{7, 5}, c10::IValue(), c10::IValue(), 1e-5),
      row("native_layer_norm_backward", reals({2, 7, 5}), reals({2, 7, 5}), Ints{5}, statistics(),
          statistics(), units({5}), reals({5}), all),
      row("_fused_rms_norm", reals({2, 7, 5}), Ints{5}, units({5}), 1e-5),
  };
}

std::vector<RuleCase> attention_cases() {
  const auto q = [] { return reals({2, 4, 3, 8}); };
  const auto kv = [] { return units({2, 4, 3, 8}); };
  const auto statistics = [] { return reals({2, 4, 3}).to(at::kFloat) + 3; };
  return {
      row("_scaled_dot_product_flash_attention_for_cpu", q(), kv(), units({2, 4, 3, 8}), 0.0, true),
      row("_scaled_dot_product_flash_attention_for_cpu", q(), units({2, 4, 5, 8}),
          units({2, 4, 5, 8}), 0.0, false, reals({3, 5})),
      row("_scaled_dot_product_flash_attention_for_cpu", q(), units({2, 4, 5, 8}),
          units({2, 4, 5, 8}), 0.0, false),
      row("_scaled_dot_product_flash_attention_for_cpu_backward", reals({2, 4, 3, 8}), q(), kv(),
          units({2, 4, 3, 8}), units({2, 4, 3, 8}), statistics().to(at::kDouble), 0.0, false),
      row("_scaled_dot_product_flash_attention_for_cpu_backward", reals({2, 4, 3, 8}), q(), kv(),
          units({2, 4, 3, 8}), units({2, 4, 3, 8}), statistics().to(at::kDouble), 0.0, true),
  };
}

at::Tensor definite(Ints batch) {
  batch.insert(batch.end(), {3, 3});
  return reals(batch) * 0.3 + at::eye(3, at::kDouble) * 2.0;
}

at::Tensor symmetric(Ints batch) {
  const auto a = definite(std::move(batch));
  return a + a.transpose(-1, -2);
}

std::vector<RuleCase> convolution_cases() {
  const Ints one{1}, none{0};
  const c10::List<bool> all({true, true, true});
  return {
      row("convolution", reals({3, 4, 6}), reals({5, 4, 3}), reals({5}), one, one, one, false, none,
          1),
      row("convolution", reals({3, 4, 6}), reals({4, 5, 3}), c10::IValue(), one, one, one, true,
          none, 1),
      row("convolution", reals({3, 4, 5, 6}), reals({6, 2, 3, 3}), reals({6}), Ints{2, 1},
          Ints{1, 0}, Ints{1, 1}, false, Ints{0, 0}, 2),
      row("convolution_backward", reals({3, 5, 6}), reals({3, 4, 6}), reals({5, 4, 3}), Ints{5},
          one, one, one, false, none, 1, all),
      row("convolution_backward", reals({3, 6, 2, 4}), reals({3, 4, 4, 6}), reals({6, 2, 3, 3}),
          Ints{6}, Ints{2, 1}, Ints{1, 0}, Ints{1, 1}, false, Ints{0, 0}, 2, all),
      row("convolution_backward", reals({3, 5, 6}), reals({3, 4, 6}), reals({5, 4, 3}),
          c10::IValue(), one, one, one, false, none, 1, c10::List<bool>({true, true, false})),
      row("native_group_norm", reals({5, 4, 3}), units({4}), reals({4}), 5, 4, 3, 2, 1e-5),
      row("native_group_norm_backward", reals({5, 4, 3}), reals({5, 4, 3}), reals({5, 2}),
          units({5, 2}), units({4}), 5, 4, 3, 2, all),
      row("native_batch_norm", reals({5, 4, 3}), units({4}), reals({4}), reals({4}), units({4}),
          true, 0.1, 1e-5),
      row("native_batch_norm", reals({5, 4, 3}), units({4}), reals({4}), reals({4}), units({4}),
          false, 0.1, 1e-5),
      row("native_batch_norm_backward", reals({5, 4, 3}), reals({5, 4, 3}), units({4}), reals({4}),
          units({4}), reals({4}), units({4}), true, 1e-5, all),
      row("native_batch_norm_backward", reals({5, 4, 3}), reals({5, 4, 3}), units({4}), reals({4}),
          units({4}), reals({0}), reals({0}), false, 1e-5, all),
  };
}

std::vector<RuleCase> resampling_cases() {
  const Ints two{2, 2};
  const auto images = [] { return reals({3, 5, 6, 4}); };
  return {
      row("avg_pool2d", images(), two),
      row("_adaptive_avg_pool2d", images(), two),
      row("max_pool2d_with_indices", images(), two),
      row("max_pool2d_with_indices", reals({5, 6, 4}), two),
      row("adaptive_max_pool2d", images(), two),
      row("_adaptive_avg_pool2d_backward", reals({3, 5, 2, 2}), images()),
      row("avg_pool2d_backward", reals({3, 5, 3, 2}), images(), two, two, Ints{0, 0}, false, true,
          c10::IValue()),
      row("max_pool2d_with_indices_backward", reals({3, 5, 3, 2}), images(), two, two, Ints{0, 0},
          Ints{1, 1}, false, indices({3, 5, 3, 2}, 24)),
      row("avg_pool3d", reals({2, 3, 4, 4, 2}), Ints{2, 2, 2}),
      row("upsample_nearest2d", images(), Ints{9, 7}),
      row("upsample_bilinear2d", images(), Ints{9, 7}, false),
      row("upsample_bilinear2d_backward", reals({3, 5, 9, 7}), Ints{9, 7}, Ints{3, 5, 6, 4}, false),
      row("upsample_nearest1d_backward", reals({3, 5, 9}), Ints{9}, Ints{3, 5, 6}),
      row("reflection_pad2d", images(), Ints{1, 2, 1, 0}),
      row("reflection_pad2d_backward", reals({3, 5, 7, 7}), images(), Ints{1, 2, 1, 0}),
      row("replication_pad1d", reals({3, 5, 6}), Ints{1, 2}),
      row("constant_pad_nd", reals({7, 5}), Ints{1, 2}, 0),
      row("constant_pad_nd", reals({7, 5}), Ints{0, 0, 1, -2}, 3.5),
      row("pixel_shuffle", reals({3, 8, 2, 3}), 2),
      row("pixel_unshuffle", reals({3, 2, 4, 6}), 2),
      row("channel_shuffle", reals({3, 8, 2, 3}), 2),
      row("grid_sampler_2d", images(), reals({3, 4, 2, 2}), 0, 0, false),
  };
}

std::vector<RuleCase> algebra_cases() {
  return {
      row("linalg_inv_ex", definite({5})),
      row("linalg_inv_ex", definite({})),
      row("linalg_cholesky_ex", symmetric({2, 3})),
      row("_linalg_det", definite({5})),
      row("_linalg_slogdet", definite({5})),
      row("linalg_lu_factor_ex", definite({5})),
      row("linalg_lu", definite({5})),
      row("linalg_matrix_exp", definite({5})),
      row("cholesky_inverse", symmetric({5})),
      row("linalg_qr", definite({5}), std::string("reduced")),
      row("_linalg_eigh", symmetric({5}), std::string("L"), true),
      row("_linalg_eigh", symmetric({5}), std::string("L"), false),
      row("_linalg_svd", definite({5}), false, true),
      row("_linalg_svd", definite({5}), false, false),
      row("linalg_solve_triangular", definite({5}), reals({5, 3, 2}), true),
      row("cholesky_solve", reals({5, 3, 2}), definite({5})),
      row("triangular_solve", reals({5, 3, 2}), definite({5})),
      row("_linalg_solve_ex", definite({5}), reals({5, 3, 2}), true, false),
      row("_linalg_solve_ex", definite({5}), reals({5, 3}), true, false),
      row("diag_embed", reals({7, 5})),
      row("diag_embed", reals({7, 5, 3}), -1, 0, 2),
      row("linalg_cross", reals({5, 3, 2}), reals({5, 3, 2}), 1),
      row("_cdist_forward", reals({2, 7, 3}), reals({2, 5, 3}), 2.0, c10::IValue()),
      row("_cdist_forward", reals({7, 3}), reals({5, 3}), 1.0, c10::IValue()),
      row("_fft_r2c", reals({7, 5}), Ints{1}, 0, true),
      row("_fft_r2c", reals({7, 5, 3}), Ints{0, 2}, 0, true),
      row("_fft_c2c", at::complex(reals({7, 5}), units({7, 5})), Ints{0}, 0, true),
      row("_fft_c2r", at::complex(reals({7, 5}), units({7, 5})), Ints{1}, 2, 8),
  };
}

}  // namespace

std::vector<RuleCase> network_cases() {
  std::vector<RuleCase> cases;
  for (const auto& part : {matmul_cases(), loss_cases(), norm_cases(), attention_cases(),
                           convolution_cases(), resampling_cases(), algebra_cases()}) {
    cases.insert(cases.end(), part.begin(), part.end());
  }
  return cases;
}

std::vector<RuleCase> list_cases() {
  const auto some = [] { return tensor_list({reals({7, 5}), reals({6}), reals({})}); };
  const auto others = [] { return tensor_list({units({7, 5}), units({6}), units({})}); };
  std::vector<RuleCase> cases;
  for (const char* op : {"_foreach_add.List", "_foreach_sub_.List", "_foreach_mul.List",
                         "_foreach_div_.List", "_foreach_maximum.List", "_foreach_copy_"}) {
    cases.push_back(row(op, some(), others()));
  }
  for (const char* op : {"_foreach_neg", "_foreach_sqrt_", "_foreach_exp", "_foreach_zero_"}) {
    cases.push_back(row(op, others()));
  }
  for (const char* op : {"_foreach_add.Scalar", "_foreach_mul_.Scalar", "_foreach_div.Scalar",
                         "_foreach_pow.Scalar"}) {
    cases.push_back(row(op, some(), 2.0));
  }
  cases.push_back(row("_foreach_mul_.Tensor", some(), units({})));
  cases.push_back(row("_foreach_add_.Tensor", some(), units({})));
  cases.push_back(row("_foreach_lerp_.Scalar", some(), others(), 0.3));
  cases.push_back(row("_foreach_addcmul_.Scalar", some(), others(), others(), 0.3));
  cases.push_back(row("_foreach_addcdiv_.Scalar", some(), others(), others(), 0.3));
  const auto steps = [] {
    return tensor_list({units({}) + 2.0, units({}) + 2.0, units({}) + 2.0});
  };
  cases.push_back(row("_fused_adamw_", some(), others(), some(), others(), c10::List<at::Tensor>(),
                      steps(), 0.1, 0.9, 0.95, 0.1, 1e-8, false, false));
  cases.push_back(
      row("_fused_sgd_", some(), others(), some(), 0.1, 0.9, 0.1, 0.0, false, false, false));
  return cases;
}

// The operators of this library (src/dtensor/fused/).

namespace {

std::vector<RuleCase> rms_norm_cases() {
  const auto rows = [] { return units({2, 7, 1}); };
  return {
      row("tessera::rms_norm", reals({2, 7, 5}), units({5}), 1e-5),
      row("tessera::rms_norm", reals({7, 5}), c10::IValue(), 1e-5),
      row("tessera::add_rms_norm", reals({2, 7, 5}), units({2, 7, 5}), units({5}), 1e-5),
      row("tessera::add_rms_norm", reals({7, 5}), units({7, 5}), c10::IValue(), 1e-5),
      row("tessera::rms_norm_backward", reals({2, 7, 5}), reals({2, 7, 5}), units({5}), rows()),
      row("tessera::rms_norm_backward", reals({2, 7, 5}), reals({2, 7, 5}), units({5}), rows(),
          units({2, 7, 5})),
  };
}

/// The recurrence in two chunks of a sequence, with heads in groups.
std::vector<RuleCase> chunked_attention_cases() {
  const auto q = [] { return reals({2, 4, 6, 8}); };
  const auto kv = [] { return units({2, 2, 9, 8}); };
  const std::vector<std::int64_t> firsts{0, 6}, documents{0, 7, 9, 18};
  return {
      row("tessera::chunked_attention", q(), kv(), units({2, 2, 9, 8}), firsts),
      row("tessera::chunked_attention", q(), kv(), units({2, 2, 9, 8}), firsts, 4),
      row("tessera::chunked_attention", q(), kv(), units({2, 2, 9, 8}), firsts, 0, documents),
      row("tessera::chunked_attention_backward", reals({2, 4, 6, 8}), q(), kv(),
          units({2, 2, 9, 8}), q(), reals({2, 4, 6}), firsts),
      row("tessera::chunked_attention_backward", reals({2, 4, 6, 8}), q(), kv(),
          units({2, 2, 9, 8}), q(), reals({2, 4, 6}), firsts, 0, documents),
  };
}

std::vector<RuleCase> fp8_linear_cases() {
  return {
      row("tessera::fp8_linear", reals({2, 7, 5}), reals({6, 5})),
      row("tessera::fp8_linear", reals({5}), reals({6, 5})),
      row("tessera::fp8_linear_input_grad", reals({2, 7, 6}), reals({6, 5})),
      row("tessera::fp8_linear_weight_grad", reals({2, 7, 6}), reals({2, 7, 5})),
  };
}

}  // namespace

std::vector<RuleCase> fused_cases() {
  // A call to the library, so that the linker keeps the library that defines the operators.
  const at::Tensor product = detail::silu_mul(reals({7, 5}), units({7, 5}));
  std::vector<RuleCase> cases{
      row("tessera::silu_mul", product, units({7, 5})),
      row("tessera::silu_mul_backward", reals({7, 5}), reals({7, 5}), units({7, 5})),
      row("tessera::silu_mul_with_gradients", reals({7, 5}), reals({7, 5}), units({7, 5})),
      row("tessera::dropout", reals({7, 5}), 0.4, 3, 4),
      row("tessera::dropout", reals({2, 3, 5}), 0.4, 3, 4, 60),
      row("tessera::embedding", reals({7, 5}), indices({2, 3}, 7)),
      row("tessera::embedding", reals({7, 5}), indices({}, 7)),
      row("tessera::embedding_backward", reals({2, 3, 5}), indices({2, 3}, 7), reals({7, 5})),
      row("tessera::cross_entropy", reals({7, 5}), indices({7}, 5), -100, 0.2, 0.1),
      row("tessera::cross_entropy_backward", reals({7}), reals({7, 5}), indices({7}, 5), reals({7}),
          -100, 0.2, 0.1),
      row("tessera::rotary_embedding", reals({3, 5, 2, 4}), reals({5, 4}), units({5, 4})),
      row("tessera::rotary_embedding", reals({3, 5, 2, 4}), reals({5, 4}), units({5, 4}), true),
      row("tessera::rotary_embedding_qk", reals({2, 5, 6, 4}), units({2, 5, 3, 4}), reals({5, 4}),
          units({5, 4})),
      row("tessera::rotary_embedding_qk", reals({2, 5, 2, 4}), units({2, 5, 3, 4}), reals({5, 4}),
          units({5, 4}), true),
  };
  for (RuleCase& each : rms_norm_cases()) {
    cases.push_back(std::move(each));
  }
  for (RuleCase& each : chunked_attention_cases()) {
    cases.push_back(std::move(each));
  }
  for (RuleCase& each : fp8_linear_cases()) {
    cases.push_back(std::move(each));
  }
  return cases;
}

}  // namespace tessera::testing
