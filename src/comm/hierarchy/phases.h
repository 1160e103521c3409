// What a collective of several hosts does one after another.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <atomic>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "hierarchy/hierarchical_communicator.h"
#include "shm/shm_reduce.h"
#include "shm/shm_rounds.h"
#include "tessera/core/detail/rounding.h"

namespace tessera::comm {

/// The groups, as the thread that runs the phases uses them. The tensors of phases are flat; `rows`
/// has equally much for each rank, host by host.
class Phases {
 public:
  explicit Phases(HostGroups groups) : groups_(std::move(groups)) {}

  const GroupInfo& group() const { return groups_.group; }
  const HostLayout& layout() const { return groups_.layout; }
  const GroupInfo& between() const { return groups_.between_info; }
  bool leads() const { return groups_.between != nullptr; }

  /// Runs one collective. `text` names it in errors.
  void run(const std::string& text, const std::function<void(Phases&)>& phases) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (failed_) {
      throw PeerError(describe(group(), text.c_str()) +
                      ": the group failed earlier; end this rank and start the job again");
    }
    try {
      phases(*this);
    } catch (const PeerError& error) {
      failed_ = true;
      throw PeerError(describe(group(), text.c_str()) + ": " + error.what());
    } catch (...) {
      failed_ = true;
      throw;
    }
  }

  void abort() {
    failed_ = true;
    groups_.inside->abort();
    if (leads()) {
      groups_.between->abort();
    }
  }

  void all_gather(const at::Tensor& rows, const at::Tensor& input) const {
    const at::Tensor own = rows_of(rows, layout().host);
    groups_.inside->all_gather(own, input)->wait();
    if (leads()) {
      exchange(rows, own);
    }
    const std::int64_t begin = layout().first_here() * input.numel();
    const std::int64_t end = begin + own.numel();
    share(rows.narrow(0, 0, begin));
    share(rows.narrow(0, end, rows.numel() - end));
  }

  void all_reduce(const at::Tensor& tensor, ReduceOp op) const {
    groups_.inside->all_reduce(tensor, op)->wait();
    if (leads()) {
      groups_.between->all_reduce(tensor, op)->wait();
    }
    share(tensor);
  }

  /// This host's part of `rows` becomes the reduction of that part; the others' are used up.
  void reduce_scatter(const at::Tensor& rows, ReduceOp op) const {
    const at::Tensor own = rows_of(rows, layout().host);
    groups_.inside->all_reduce(rows, op)->wait();
    if (leads()) {
      reduce_between(own, rows, op);
    }
    share(own);
  }

  void broadcast(const at::Tensor& tensor, int root) const {
    const HostLayout of_root(as_rank(root));
    const bool here = of_root.host == layout().host;
    if (here) {
      groups_.inside->broadcast(tensor, of_root.local)->wait();
    }
    if (leads()) {
      groups_.between->broadcast(tensor, of_root.host)->wait();
    }
    if (!here) {
      share(tensor);
    }
  }

  void barrier() const {
    groups_.inside->barrier();
    if (leads()) {
      groups_.between->barrier();
    }
    groups_.inside->barrier();
  }

  GroupInfo as_rank(int rank) const {
    GroupInfo info = group();
    info.rank = rank;
    return info;
  }

 private:
  at::Tensor rows_of(const at::Tensor& rows, int host) const {
    const std::int64_t row = rows.numel() / group().size();
    return rows.narrow(0, layout().first[static_cast<std::size_t>(host)] * row,
                       layout().count(host) * row);
  }

  /// The leader's bytes go to the other ranks of its host.
  void share(const at::Tensor& tensor) const {
    if (tensor.numel() > 0) {
      groups_.inside->broadcast(tensor, 0)->wait();
    }
  }

  /// Gloo answers a peer that is ready to send behind what it sends itself: between two ranks a
  /// large message goes one way, then one goes the other. Of several pieces only the first waits
  /// so.
  static int pieces_of(const at::Tensor& rows) {
    constexpr std::int64_t kPieceBytes = 1 << 20;
    return static_cast<int>(rounds_for(bytes_of(rows), kPieceBytes));
  }

  static at::Tensor piece_of(const at::Tensor& block, int piece, int pieces) {
    const EqualParts parts{block.numel(), tessera::detail::ceil_div(block.numel(), pieces)};
    return block.narrow(0, parts.offset(piece), parts.bytes(piece));
  }

  /// Each leader has the rows of its host, and gets those of the others.
  void exchange(const at::Tensor& rows, const at::Tensor& own) const {
    // A ring sends to one peer and receives from another.
    if (layout().even() && layout().hosts() > 2) {
      groups_.between->all_gather(rows, own)->wait();
      return;
    }
    const int pieces = pieces_of(rows);
    const std::vector<Trade> trades = start_trades(rows, own, /*sends_own=*/true);
    for (int piece = 0; piece < pieces; ++piece) {
      const Trade& done = trades[static_cast<std::size_t>(piece)];
      done.work->wait();
      const std::byte* next = data_of(done.received);
      for (const at::Tensor& to : others(pieces_by_host(rows, piece, pieces))) {
        copy_bytes(data_of(to), next, bytes_of(to));
        next += bytes_of(to);
      }
    }
  }

  /// In the hosts' order.
  void reduce_between(const at::Tensor& own, const at::Tensor& rows, ReduceOp op) const {
    const int pieces = pieces_of(rows);
    const std::vector<Trade> trades = start_trades(rows, own, /*sends_own=*/false);
    for (int piece = 0; piece < pieces; ++piece) {
      const Trade& done = trades[static_cast<std::size_t>(piece)];
      done.work->wait();
      const at::Tensor sum = piece_of(own, piece, pieces);
      std::vector<const std::byte*> terms;
      const std::byte* next = data_of(done.received);
      for (int host = 0; host < layout().hosts(); ++host) {
        const bool here = host == layout().host;
        terms.push_back(here ? data_of(sum) : next);
        next += here ? 0 : bytes_of(sum);
      }
      // Not by libtorch, whose operators would start threads beside those that compute.
      find_reduce(sum.scalar_type(), op)(data_of(sum), terms,
                                         static_cast<std::size_t>(sum.numel()));
    }
  }

  std::vector<at::Tensor> pieces_by_host(const at::Tensor& rows, int piece, int pieces) const {
    std::vector<at::Tensor> all;
    for (int host = 0; host < layout().hosts(); ++host) {
      all.push_back(piece_of(rows_of(rows, host), piece, pieces));
    }
    return all;
  }

  /// Without that of this host.
  std::vector<at::Tensor> others(std::vector<at::Tensor> by_host) const {
    by_host.erase(by_host.begin() + layout().host);
    return by_host;
  }

  /// What other hosts sent lies one after another, by host.
  struct Trade {
    WorkPtr work;
    at::Tensor received;
  };

  /// Sends `sent` and receives as much as `like`, both by host.
  Trade trade(const std::vector<at::Tensor>& sent, const std::vector<at::Tensor>& like) const {
    const auto counts = [this](const std::vector<at::Tensor>& by_host) {
      std::vector<std::int64_t> counts;
      for (const at::Tensor& tensor : by_host) {
        counts.push_back(tensor.numel());
      }
      counts[static_cast<std::size_t>(layout().host)] = 0;
      return counts;
    };
    const auto buffer = [&](const std::vector<std::int64_t>& of) {
      return at::empty({std::accumulate(of.begin(), of.end(), std::int64_t{0})},
                       sent.front().options());
    };
    const std::vector<std::int64_t> out = counts(sent);
    const std::vector<std::int64_t> in = counts(like);
    const at::Tensor input = buffer(out);
    std::byte* next = data_of(input);
    for (const at::Tensor& tensor : others(sent)) {
      copy_bytes(next, data_of(tensor), bytes_of(tensor));
      next += bytes_of(tensor);
    }
    const at::Tensor output = buffer(in);
    return {groups_.between->all_to_all(output, input, in, out), output};
  }

  /// A trade for each piece. `sends_own`: `own` goes to all hosts, and their rows come; else their
  /// rows go out, and a term of `own` comes from each.
  std::vector<Trade> start_trades(const at::Tensor& rows, const at::Tensor& own,
                                  bool sends_own) const {
    const int pieces = pieces_of(rows);
    std::vector<Trade> trades;
    for (int piece = 0; piece < pieces; ++piece) {
      const std::vector<at::Tensor> by_host = pieces_by_host(rows, piece, pieces);
      const std::vector<at::Tensor> same(by_host.size(), piece_of(own, piece, pieces));
      trades.push_back(sends_own ? trade(same, by_host) : trade(by_host, same));
    }
    return trades;
  }

  HostGroups groups_;
  std::atomic<bool> failed_{false};
};

}  // namespace tessera::comm
