// Operators that libtorch builds of many others, where it writes to views, reads expanded tensors
// or meets shards without a position: on a line of 4, every placement of the first argument.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "operator_case.h"
#include "tessera/dtensor/policy.h"

namespace tessera {
namespace {

using testing::OperatorCase;
using Tensors = std::vector<at::Tensor>;

class Composite : public ::testing::TestWithParam<OperatorCase> {};

TEST_P(Composite, EqualsOneRank) {
  testing::expect_equals_one_rank(GetParam(), {4});
}

INSTANTIATE_TEST_SUITE_P(
    Convolution, Composite,
    ::testing::Values(
        OperatorCase{"conv1d",
                     {{5, 4, 6}, {6, 2, 3}, {6}},
                     [](const Tensors& t) {
                       return at::conv1d(t[0], t[1], t[2], 1, at::IntArrayRef{1}, 1, 2);
                     }},
        OperatorCase{"conv1d_of_one_sample",
                     {{3, 6}, {5, 3, 3}, {5}},
                     [](const Tensors& t) { return at::conv1d(t[0], t[1], t[2]); }},
        OperatorCase{"conv2d",
                     {{3, 2, 5, 4}, {3, 2, 2, 2}, {3}},
                     [](const Tensors& t) { return at::conv2d(t[0], t[1], t[2], 2); }},
        OperatorCase{"conv_transpose1d",
                     {{2, 3, 5}, {3, 2, 3}, {2}},
                     [](const Tensors& t) { return at::conv_transpose1d(t[0], t[1], t[2], 2); }},
        OperatorCase{
            "conv_transpose2d",
            {{5, 2, 3, 2}, {2, 1, 2, 2}, {2}},
            [](const Tensors& t) { return at::conv_transpose2d(t[0], t[1], t[2], 1, 0, 0, 2); }}),
    [](const auto& param_info) { return param_info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Reflectors, Composite,
    ::testing::Values(
        OperatorCase{"householder_product",
                     {{5, 3}, {3}},
                     [](const Tensors& t) { return at::linalg_householder_product(t[0], t[1]); }},
        OperatorCase{"householder_products",
                     {{2, 5, 3}, {2, 3}},
                     [](const Tensors& t) { return at::linalg_householder_product(t[0], t[1]); }},
        OperatorCase{"ormqr",
                     {{5, 3}, {3}, {5, 2}},
                     [](const Tensors& t) { return at::ormqr(t[0], t[1], t[2]); }}),
    [](const auto& param_info) { return param_info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Expanded, Composite,
    ::testing::Values(OperatorCase{"combinations",
                                   {{5}},
                                   [](const Tensors& t) {
                                     const ReplicationScope of_its_mask;
                                     return at::combinations(t[0]);
                                   }},
                      OperatorCase{"masked_select",
                                   {{5}},
                                   [](const Tensors& t) {
                                     const auto chosen = t[0].detach().expand({3, 5}).gt(0);
                                     return at::masked_select(t[0].expand({3, 5}), chosen);
                                   }},
                      OperatorCase{"istft",
                                   {{5, 7, 2}},
                                   [](const Tensors& t) {
                                     const ReplicationScope of_its_window;
                                     return at::istft(at::view_as_complex(t[0].contiguous()), 8, 2);
                                   }}),
    [](const auto& param_info) { return param_info.param.name; });

}  // namespace
}  // namespace tessera
