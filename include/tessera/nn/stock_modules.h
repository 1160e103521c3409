#pragma once

#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <array>

#include "tessera/nn/hooked.h"

/// Which members of libtorch's modules are parameters, for nn::Hooked.
namespace tessera::nn {

template <>
inline constexpr std::array kSlotMembers<torch::nn::LinearImpl>{
    SlotMember<torch::nn::LinearImpl>{"weight", &torch::nn::LinearImpl::weight},
    SlotMember<torch::nn::LinearImpl>{"bias", &torch::nn::LinearImpl::bias}};

template <>
inline constexpr std::array kSlotMembers<torch::nn::BilinearImpl>{
    SlotMember<torch::nn::BilinearImpl>{"weight", &torch::nn::BilinearImpl::weight},
    SlotMember<torch::nn::BilinearImpl>{"bias", &torch::nn::BilinearImpl::bias}};

template <>
inline constexpr std::array kSlotMembers<torch::nn::EmbeddingImpl>{
    SlotMember<torch::nn::EmbeddingImpl>{"weight", &torch::nn::EmbeddingImpl::weight}};

template <>
inline constexpr std::array kSlotMembers<torch::nn::LayerNormImpl>{
    SlotMember<torch::nn::LayerNormImpl>{"weight", &torch::nn::LayerNormImpl::weight},
    SlotMember<torch::nn::LayerNormImpl>{"bias", &torch::nn::LayerNormImpl::bias}};

template <>
inline constexpr std::array kSlotMembers<torch::nn::GroupNormImpl>{
    SlotMember<torch::nn::GroupNormImpl>{"weight", &torch::nn::GroupNormImpl::weight},
    SlotMember<torch::nn::GroupNormImpl>{"bias", &torch::nn::GroupNormImpl::bias}};

template <>
inline constexpr std::array kSlotMembers<torch::nn::Conv1dImpl>{
    SlotMember<torch::nn::Conv1dImpl>{"weight", &torch::nn::Conv1dImpl::weight},
    SlotMember<torch::nn::Conv1dImpl>{"bias", &torch::nn::Conv1dImpl::bias}};

template <>
inline constexpr std::array kSlotMembers<torch::nn::Conv2dImpl>{
    SlotMember<torch::nn::Conv2dImpl>{"weight", &torch::nn::Conv2dImpl::weight},
    SlotMember<torch::nn::Conv2dImpl>{"bias", &torch::nn::Conv2dImpl::bias}};

}  // namespace tessera::nn
