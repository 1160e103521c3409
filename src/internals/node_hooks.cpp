#include "tessera/internals/detail/node_hooks.h"

#include <torch/csrc/autograd/function_hook.h>

namespace tessera::detail {
namespace {

class Before final : public torch::autograd::FunctionPreHook {
 public:
  explicit Before(std::function<void()> call) : call_(std::move(call)) {}
  variable_list operator()(const variable_list& gradients) override {
    call_();
    return gradients;
  }

 private:
  std::function<void()> call_;
};

class After final : public torch::autograd::FunctionPostHook {
 public:
  explicit After(std::function<void()> call) : call_(std::move(call)) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    call_();
    return outputs;
  }

 private:
  std::function<void()> call_;
};

}  // namespace

void watch_node(Node& node, std::function<void()> before, std::function<void()> after) {
  node.add_pre_hook(std::make_unique<Before>(std::move(before)));
  node.add_post_hook(std::make_unique<After>(std::move(after)));
}

}  // namespace tessera::detail
