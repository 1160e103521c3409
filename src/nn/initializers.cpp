#include "tessera/nn/initialization.h"

#include "tessera/dtensor/distributed_tensor.h"

namespace tessera::nn::init {

Initializer constant(double value) {
  return [=](const at::Tensor& tensor, RandomKey) { local_tensor(tensor).detach().fill_(value); };
}

Initializer zeros() {
  return constant(0.0);
}

Initializer ones() {
  return constant(1.0);
}

Initializer uniform(double from, double to) {
  return [=](const at::Tensor& tensor, RandomKey key) { uniform_(tensor, from, to, key); };
}

Initializer normal(double mean, double std) {
  return [=](const at::Tensor& tensor, RandomKey key) { normal_(tensor, mean, std, key); };
}

Initializer trunc_normal(double mean, double std, double low, double high) {
  return [=](const at::Tensor& tensor, RandomKey key) {
    trunc_normal_(tensor, mean, std, low, high, key);
  };
}

}  // namespace tessera::nn::init
