// Whether what a rank has of a tensor was cut and used as if it were whole. A share of the rows of
// a fused weight, chunked into as many pieces, gives each rank other pieces than the weight has;
// but heads or tokens of a part may well be taken one by one. So the cut alone says nothing: an
// operator that computes with two of the pieces does.

#include "tessera/dtensor/detail/met_pieces.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "random/local_part.h"
#include "random/pieces.h"
#include "tensor/to_local_node.h"

namespace tessera::detail {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;

/// What went into a distributed tensor from plain ones, a few operators before it was handed out
/// again: a norm, for the most part.
std::vector<Edge> edges_behind_style(const ToLocalBackward& given) {
  constexpr std::size_t kMostNodes = 16;
  std::vector<Edge> found;
  std::vector<const Node*> seen{&given};
  for (std::size_t i = 0; i < seen.size() && seen.size() < kMostNodes; ++i) {
    for (const Edge& next : seen[i]->next_edges()) {
      if (!next.is_valid() || is_source(*next.function)) {
        continue;
      }
      if (next.function->name() == "FromLocalBackward") {
        found.push_back(next.function->next_edge(0));
      } else {
        seen.push_back(next.function.get());
      }
    }
  }
  std::erase_if(found, [](const Edge& edge) { return !edge.is_valid(); });
  return found;
}

class Search {
 public:
  std::optional<MetPieces> from(const Edge& end) {
    Node* const root = end.function.get();
    // Without a recursion, since graphs are deep.
    std::vector<Place> open{{root, false}};
    while (!open.empty() && !met_) {
      const Place place = open.back();
      if (pieces_in_.contains(place)) {
        open.pop_back();
      } else if (add_missing(place, open)) {
        pieces_in_.emplace(place, gathered(place));
        open.pop_back();
      }
    }
    if (!met_) {
      check_complete(pieces_behind(end, pieces_in_.at({root, false})));
    }
    return std::move(met_);
  }

 private:
  /// A node, and whether a style that took a part and handed out one is between it and the end. The
  /// search goes behind one, not through the whole model.
  using Place = std::pair<const Node*, bool>;
  /// What was cut, and along which dimension.
  using Cut = std::tuple<const Node*, std::uint32_t, std::int64_t>;
  /// Of each cut the piece, by its beginning, or those that were put together.
  using Pieces = std::map<Cut, std::set<std::int64_t>>;

  static std::vector<std::pair<Edge, Place>> before(const Place& place) {
    const auto& [node, is_behind] = place;
    std::vector<std::pair<Edge, Place>> steps;
    if (const auto* given = dynamic_cast<const ToLocalBackward*>(node)) {
      if (!is_behind && !given->layout->is_replicated()) {
        for (const Edge& edge : edges_behind_style(*given)) {
          steps.emplace_back(edge, Place(edge.function.get(), true));
        }
      }
    } else if (!is_source(*node)) {
      for (const Edge& next : node->next_edges()) {
        if (next.is_valid()) {
          steps.emplace_back(next, Place(next.function.get(), is_behind));
        }
      }
    }
    return steps;
  }

  /// Adds what `place` was computed from and is not known. Returns whether all is.
  bool add_missing(const Place& place, std::vector<Place>& open) const {
    bool complete = true;
    for (const auto& [edge, from] : before(place)) {
      if (!pieces_in_.contains(from)) {
        open.push_back(from);
        complete = false;
      }
    }
    return complete;
  }

  Pieces gathered(const Place& place) {
    Pieces all;
    for (const auto& [edge, from] : before(place)) {
      for (const auto& [cut, begins] : pieces_behind(edge, pieces_in_.at(from))) {
        const auto [entry, is_new] = all.emplace(cut, begins);
        if (!is_new && entry->second != begins) {
          if (!puts_together(*place.first)) {
            note(cut, MetPieces::How::kTogether);
          } else if (*begins.begin() < *entry->second.rbegin()) {
            note(cut, MetPieces::How::kReordered);
          }
        }
        entry->second.insert(begins.begin(), begins.end());
      }
    }
    return all;
  }

  /// `pieces`, with what `edge` itself has cut.
  Pieces pieces_behind(const Edge& edge, Pieces pieces) {
    if (const std::optional<Piece> piece = piece_of(edge)) {
      const Edge& from = edge.function->next_edge(0);
      const auto dims = from.is_valid() ? std::ssize(sizes_of_result(from)) : 0;
      if (dims > 0 && cuts_share(from, *piece, counted_from_front(piece->dim, dims))) {
        const Cut cut{from.function.get(), from.input_nr, counted_from_front(piece->dim, dims)};
        pieces[cut].insert(piece->begin);
        cuts_[cut].count = piece->count;
        // One of several that are taken by themselves is what a loop over heads does.
        cuts_[cut].ends[piece->begin] = piece->removes_dim ? kWhole : piece->begin + piece->length;
      }
    }
    return pieces;
  }

  /// Whether a piece of `from` is one of a rank's share, and not its share of a whole part.
  bool cuts_share(const Edge& from, const Piece& piece, std::int64_t dim) {
    const LocalPart& part = parts_.of(from);
    if (!part.unknown.empty()) {
      return false;
    }
    const LocalPart::Dim& digits = part.dims.at(static_cast<std::size_t>(dim));
    return is_split_dim(digits) &&
           (piece.removes_dim || !has_whole_parts(digits, piece.begin, piece.length));
  }

  /// The end of a model's part has all pieces of what it was computed from, or none.
  void check_complete(const Pieces& pieces) {
    for (const auto& [cut, begins] : pieces) {
      const auto& [node, result, dim] = cut;
      const Edge from(const_cast<Node*>(node)->getptr(), result);
      const std::int64_t size = sizes_of_result(from)[static_cast<std::size_t>(dim)];
      std::int64_t end = 0;
      for (const std::int64_t begin : begins) {
        const std::int64_t own = cuts_.at(cut).ends.at(begin);
        end = own == kWhole ? size : begin <= end ? std::max(end, own) : end;
      }
      if (end < size) {
        note(cut, MetPieces::How::kAlone);
      }
    }
  }

  void note(const Cut& cut, MetPieces::How how) {
    const auto& [node, result, dim] = cut;
    const Edge edge(const_cast<Node*>(node)->getptr(), result);
    met_ = MetPieces{how, sizes_of_result(edge), dim, cuts_.at(cut).count, parameter_behind(edge)};
  }

  static constexpr std::int64_t kWhole = -1;
  struct Cuts {
    std::int64_t count = 0;                     ///< as in MetPieces
    std::map<std::int64_t, std::int64_t> ends;  ///< of the pieces, by their beginnings
  };

  std::map<Place, Pieces> pieces_in_;
  std::map<Cut, Cuts> cuts_;
  LocalParts parts_{LocalParts::Pieces::kWhole};
  std::optional<MetPieces> met_;
};

}  // namespace

std::optional<MetPieces> met_pieces(const at::Tensor& tensor) {
  return tensor.grad_fn() == nullptr
             ? std::nullopt
             : Search().from(
                   Edge(tensor.grad_fn(), static_cast<std::uint32_t>(tensor.output_nr())));
}

}  // namespace tessera::detail
