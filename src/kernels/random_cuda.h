// The kernels of random.cu, as cuda_registration.cpp registers them.
#pragma once

#include "tessera/kernels/detail/random.h"

namespace tessera::kernels {

void fill_random_cuda(const at::Tensor& local, const GlobalPlace& place,
                      const Distribution& distribution, PhiloxKey key);
void dropout_cuda(const at::Tensor& out, const at::Tensor& x, const GlobalPlace& place, double p,
                  PhiloxKey key);

}  // namespace tessera::kernels
