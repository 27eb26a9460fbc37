// Sorts a batch by the owners of its ids on the CPU.
//
// Within an owner the ids keep their order, which is the order of the bags. So the batch is cut into pieces of whole
// bags. A first pass over the pieces finds the owner of each id and counts the ids by owner and bag; then the place of
// the first id of each owner and piece is known, and a second pass moves the ids.
#include <algorithm>
#include <bit>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "checks.h"
#include "kernel.h"
#include "mix64.h"
#include "parallel.h"
#include "ranks/owner.h"
#include "ranks/owners_arguments.h"
#include "simd.h"

namespace torchrec_dyn {
namespace {

constexpr int64_t kGrain = 8192;  // ids and bags of a piece

TORCHREC_DYN_SIMD void owners_of_range(const uint64_t* ids, int64_t begin, int64_t end, uint64_t ranks,
                                       uint32_t* owners) noexcept {
  const uint64_t ids_per_rank = std::numeric_limits<uint64_t>::max() / ranks;
  for (int64_t i = begin; i < end; ++i) owners[i] = static_cast<uint32_t>(owner_of(mix64(ids[i]), ranks, ids_per_rank));
}

// Some whole bags, and their ids.
struct Piece {
  int64_t first_bag, last_bag;
  int64_t begin, end;
};

// Cuts the bags into pieces. Checks that the lengths are at least 0 and add up to the number of ids.
template <typename Length>
std::vector<Piece> cut(const Length* lengths, int64_t bags, int64_t ids) {
  std::vector<Piece> pieces;
  const int64_t count = (ids + bags) / kGrain + 1;
  const int64_t bags_each = (bags + count - 1) / count;
  int64_t begin = 0;
  bool fits = true;
  for (int64_t bag = 0; bag < bags && fits; bag += bags_each) {
    const int64_t last = std::min(bags, bag + bags_each);
    // Of ORed lengths, the highest bit is that of the largest one. So this sum does not overflow.
    uint64_t any = 0, sum = 0;
    for (int64_t b = bag; b < last; ++b) {
      any |= static_cast<uint64_t>(int64_t{lengths[b]});
      sum += static_cast<uint64_t>(int64_t{lengths[b]});
    }
    fits =
        std::bit_width(any) <= std::bit_width(static_cast<uint64_t>(ids)) && sum <= static_cast<uint64_t>(ids - begin);
    if (!fits) break;
    pieces.push_back({bag, last, begin, begin + static_cast<int64_t>(sum)});
    begin = pieces.back().end;
  }
  check_lengths_fit(fits && begin == ids, ids);
  return pieces;
}

// A batch whose ids are sorted by owner.
struct Sorting {
  int64_t bags;
  int64_t ranks;
  std::vector<Piece> pieces;
  std::unique_ptr<uint32_t[]> owners;  // by ids
  std::vector<int64_t> places;         // by pieces and ranks: the place of the first id

  Sorting(std::vector<Piece> cut_pieces, int64_t ids, int64_t bag_count, int64_t rank_count)
      : bags(bag_count),
        ranks(rank_count),
        pieces(std::move(cut_pieces)),
        owners(new uint32_t[static_cast<size_t>(ids)]),
        places(pieces.size() * static_cast<size_t>(rank_count)) {}

  // Finds the owners, and writes the number of ids by owner and bag to sorted_lengths.
  template <typename Length>
  void count(const int64_t* ids, const Length* lengths, Length* sorted_lengths) {
    for_each_task(static_cast<int64_t>(pieces.size()), [&](int64_t p) {
      const Piece& piece = pieces[static_cast<size_t>(p)];
      owners_of_range(reinterpret_cast<const uint64_t*>(ids), piece.begin, piece.end, static_cast<uint64_t>(ranks),
                      owners.get());
      for (int64_t r = 0; r < ranks; ++r)
        std::fill(sorted_lengths + r * bags + piece.first_bag, sorted_lengths + r * bags + piece.last_bag, Length{0});
      const uint32_t* owner = owners.get() + piece.begin;
      for (int64_t bag = piece.first_bag; bag < piece.last_bag; ++bag)
        for (const uint32_t* end = owner + lengths[bag]; owner < end; ++owner) ++sorted_lengths[*owner * bags + bag];
      for (int64_t r = 0; r < ranks; ++r) {
        int64_t sum = 0;
        for (int64_t bag = piece.first_bag; bag < piece.last_bag; ++bag) sum += sorted_lengths[r * bags + bag];
        places[static_cast<size_t>(p * ranks + r)] = sum;
      }
    });
    int64_t next = 0;
    for (int64_t r = 0; r < ranks; ++r)
      for (size_t p = 0; p < pieces.size(); ++p)
        next += std::exchange(places[p * static_cast<size_t>(ranks) + static_cast<size_t>(r)], next);
  }

  // Calls visit(i, place) for each id.
  template <typename Visit>
  void each_place(const Visit& visit) const {
    for_each_task(static_cast<int64_t>(pieces.size()), [&](int64_t p) {
      const auto first = places.begin() + p * ranks;
      std::vector<int64_t> next(first, first + ranks);
      const Piece& piece = pieces[static_cast<size_t>(p)];
      for (int64_t i = piece.begin; i < piece.end; ++i) visit(i, next[owners[static_cast<size_t>(i)]]++);
    });
  }

  template <typename Value>
  void move(const Tensor& values, const Tensor& sorted) const {
    const Value* value = const_data<Value>(values);
    Value* to = mutable_data<Value>(sorted);
    each_place([=](int64_t i, int64_t place) { to[place] = value[i]; });
  }
};

template <typename Length>
Sorting counted(const Tensor& ids, const Tensor& lengths, int64_t ranks, const Tensor& sorted_lengths) {
  const auto* length = const_data<Length>(lengths);
  Sorting sorting(cut(length, lengths.numel(), ids.numel()), ids.numel(), lengths.numel(), ranks);
  sorting.count(const_data<int64_t>(ids), length, mutable_data<Length>(sorted_lengths));
  return sorting;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sort_by_owner(const Tensor& ids, const Tensor& lengths,
                                                         std::optional<Tensor> weights, int64_t ranks, bool positions) {
  const ScalarType type = check_sorted_batch(ids, lengths, weights, ranks, DeviceType::CPU);
  const int64_t count = ids.numel();
  Tensor sorted_lengths = new_tensor({ranks * lengths.numel()}, lengths.scalar_type());
  Tensor sorted_ids = new_int64(count);
  Tensor sorted_weights = new_tensor({weights ? count : 0}, type);
  Tensor places = new_int64(positions ? count : 0);
  const Sorting sorting = lengths.scalar_type() == ScalarType::Int
                              ? counted<int32_t>(ids, lengths, ranks, sorted_lengths)
                              : counted<int64_t>(ids, lengths, ranks, sorted_lengths);
  sorting.move<int64_t>(ids, sorted_ids);
  if (weights && type == ScalarType::Float) sorting.move<uint32_t>(*weights, sorted_weights);
  if (weights && type == ScalarType::Double) sorting.move<uint64_t>(*weights, sorted_weights);
  if (weights && weights->element_size() == 2) sorting.move<uint16_t>(*weights, sorted_weights);
  if (positions) {
    int64_t* to = mutable_data<int64_t>(places);
    sorting.each_place([=](int64_t i, int64_t place) { to[i] = place; });
  }
  return {sorted_ids, sorted_lengths, sorted_weights, places};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) { m.impl(TORCHREC_DYN_KERNEL("sort_by_owner", &sort_by_owner)); }

}  // namespace torchrec_dyn
