// Collectives lie between the steps of an export. So code that can fail on one rank runs inside
// run_or_fail_on_all(), or its error is kept until the next such call.

#include "hugging_face/send_parameters.h"

#include "all_ranks.h"
#include "blocks/gather_blocks.h"

namespace tessera::checkpoint {
namespace {

c10::ScalarType saved_type(const at::Tensor& tensor, SentType dtype) {
  const c10::ScalarType type = tensor.scalar_type();
  if (!c10::isFloatingType(type)) {
    return type;
  }
  return dtype.value_or(type == c10::kDouble ? type : c10::kFloat);
}

}  // namespace

std::vector<SentParameter> sent_by_name(const std::vector<NamedParameter>& parameters) {
  std::vector<SentParameter> sent;
  for (const NamedParameter& each : parameters) {
    sent.push_back({each.slot, stored_tensors(each.names.front(), *each.slot)});
  }
  return sent;
}

std::vector<SafetensorsWriter::Item> items_of(const std::vector<SentParameter>& parameters,
                                              SentType dtype) {
  std::vector<SafetensorsWriter::Item> items;
  for (const SentParameter& each : parameters) {
    check_one_value(*each.slot, each.tensors.front().name);
    for (const StoredTensor& stored : each.tensors) {
      items.push_back({stored.name, saved_type(each.slot->persistent(), dtype), stored.sizes});
    }
  }
  return items;
}

void Receiver::write(const std::string& name, std::span<const std::int64_t> offset,
                     const at::Tensor& block) {
  if (failure_) {
    return;
  }
  try {
    write_(name, offset, block);
  } catch (...) {
    failure_ = std::current_exception();
  }
}

void Receiver::check() const {
  if (failure_) {
    std::rethrow_exception(failure_);
  }
}

/// The same order on every rank: gather_blocks() is collective. A rank that fails within (its
/// memory may be full) tells the others, who would wait for its blocks.
void send_all(const std::vector<SentParameter>& parameters, comm::World& world, Receiver& receiver,
              SentType dtype) {
  const auto group = all_ranks(world);
  try {
    for (const SentParameter& each : parameters) {
      const auto& tensor = each.slot->persistent();
      gather_blocks(tensor, saved_type(tensor, dtype), *group,
                    c10::Device(world.options().device).type(),
                    [&](std::span<const std::int64_t> offset, const at::Tensor& block) {
                      for (const StoredTensor& stored : each.tensors) {
                        stored.visit(offset, block, [&](const auto& at, const at::Tensor& part) {
                          receiver.write(stored.name, at, part);
                        });
                      }
                    });
    }
  } catch (...) {
    world.abort();
    throw;
  }
}

}  // namespace tessera::checkpoint
