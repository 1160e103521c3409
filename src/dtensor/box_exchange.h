#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/core/layout_math.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {

/// A part of a tensor and the ranks that hold it, all of it. Ranks are positions in a mesh.
struct HeldPart {
  std::vector<Box> boxes;
  std::vector<int> ranks;
};

/// The parts of a tensor that lies on `mesh` as `layout`, which is not partial; disjoint.
std::vector<HeldPart> held_parts(const DeviceMesh& mesh, LayoutPtr layout, c10::IntArrayRef sizes);

/// Brings parts of a tensor from the ranks of a mesh that hold them to those that are to, in one
/// all-to-all. Every rank finds the same exchange by itself; a rank that has what it needs takes
/// its own, and the holders of a part share the work of sending it.
class BoxExchange {
 public:
  /// `parts` are disjoint and make up the tensor; `wanted[r]`: what rank r is to hold.
  BoxExchange(std::vector<HeldPart> parts, std::vector<std::vector<Box>> wanted)
      : parts_(std::move(parts)), wanted_(std::move(wanted)) {}

  /// Whether any rank has to send anything.
  bool moves() const;
  /// This rank's wanted part, of local `sizes`, from its `local` one. Collective over all of `mesh`
  /// if moves(). Below autograd.
  at::Tensor run(const at::Tensor& local, c10::IntArrayRef sizes, const DeviceMesh& mesh) const;

 private:
  /// A block that goes from one rank to another: where it lies at each.
  struct Piece {
    std::vector<std::int64_t> from, to, sizes;
  };
  std::vector<Piece> pieces(int sender, int receiver) const;
  static int sender_of(const HeldPart& part, int receiver);

  std::vector<HeldPart> parts_;
  std::vector<std::vector<Box>> wanted_;
};

}  // namespace tessera::detail
