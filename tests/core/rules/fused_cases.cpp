// The operators of this library (src/dtensor/fused/).
#include "rule_cases.h"
#include "tessera/dtensor/detail/fused_operators.h"

namespace tessera::testing {
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

/// Two chunks of a sequence; heads in groups.
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
  // A call, so that the program is linked with the library that defines the operators.
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
