// Parts: the ids of several tables, cut by hash, so that all threads work on one table. A part holds the ids of
// one table whose hashes begin with the same bits, in their order. The slots of new ids depend on the cut: so
// part_bits_of looks at ids and maps only, not at the number of threads. `for_each_task(tasks, task)` calls task(i) for
// every i, on any threads.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "storage/id_map.h"

namespace torchrec_dyn {

// A stretch of the ids of one table.
struct Piece {
  int64_t table;
  int64_t begin;
  int64_t end;
};

constexpr int64_t kPartIds = 1 << 13;

// Cuts the ids of `tables` tables into pieces; offsets [tables + 1] says where the ids of each table begin.
inline std::vector<Piece> pieces_of(const int64_t* offsets, int64_t tables) {
  std::vector<Piece> pieces;
  for (int64_t t = 0; t < tables; ++t)
    for (int64_t begin = offsets[t]; begin < offsets[t + 1]; begin += kPartIds)
      pieces.push_back({t, begin, std::min(begin + kPartIds, offsets[t + 1])});
  return pieces;
}

template <typename T>
std::unique_ptr<T[]> uninitialised(int64_t count) {
  return std::make_unique_for_overwrite<T[]>(static_cast<size_t>(count));
}

// The number of leading bits that cut `size` ids or slots into parts of at least `least`, at most 1,024 parts.
inline int part_bits(int64_t size, int64_t least) {
  return std::clamp(static_cast<int>(std::bit_width(static_cast<uint64_t>(size / least))) - 1, 0, 10);
}

// The bits that cut the ids of each table, which are in its map or will be: parts of at least 512 ids and 1,024 slots.
inline std::vector<int> part_bits_of(const int64_t* offsets, const std::vector<IdMapView>& maps) {
  std::vector<int> bits;
  for (size_t t = 0; t < maps.size(); ++t)
    bits.push_back(std::min(part_bits(offsets[t + 1] - offsets[t], 512), part_bits(maps[t].arrays[1].capacity, 1024)));
  return bits;
}

struct Part {
  int64_t table;
  int bits;         // the number of leading bits that the hashes share
  uint64_t prefix;  // these bits
  int64_t* begin;   // places of the ids, ascending
  int64_t* end;

  // The first slot of an array that may be the home of an id of a later part: tasks that write their parts' slots
  // before it write no slot of another part.
  int64_t limit(const SlotArray& array) const {
    return prefix + 1 == uint64_t{1} << bits ? array.capacity : array.home((prefix + 1) << (64 - bits));
  }
  // The hash of an id, without the bits that all ids of the part share.
  uint64_t rest(uint64_t hash) const { return hash << bits; }

  // Calls visit(place, map, array, limit) for each id, where `array` of the map holds the id, and prefetches the homes
  // of later ids. If it returns false, this and all later ids are left over (a repeat must not come before the id that
  // it repeats): their places move to `begin`. Returns the end of these places.
  template <typename Visit>
  int64_t* visit_homes(const IdMapView& map, const uint64_t* hashes, const Visit& visit) const {
    constexpr int64_t kBurst = 64;
    const int64_t limits[2] = {limit(map.arrays[0]), limit(map.arrays[1])};
    const auto prefetch = [&](const int64_t* from) __attribute__((always_inline)) {
      for (const int64_t* place = from; place < end && place < from + kBurst; ++place)
        prefetch_home(map, hashes[*place]);
    };
    prefetch(begin);
    int64_t* left_over = begin;
    for (const int64_t* place = begin; place < end; ++place) {
      if ((place - begin) % kBurst == 0 && end - place > kBurst) prefetch(place + kBurst);
      const bool is_outgoing = hashes[*place] >= map.frontier;
      if (left_over != begin || !visit(*place, map, map.arrays[is_outgoing], limits[is_outgoing]))
        *left_over++ = *place;
    }
    return left_over;
  }
};

class Parts {
 public:
  // Cuts the ids of each table by the first bits[t] bits of their hashes.
  template <typename ForEachTask>
  Parts(const int64_t* offsets, const std::vector<int>& bits, const uint64_t* hashes, const ForEachTask& for_each_task)
      : order_(uninitialised<int64_t>(offsets[bits.size()])) {
    std::vector<Piece> pieces = pieces_of(offsets, static_cast<int64_t>(bits.size()));
    std::erase_if(pieces, [&](const Piece& piece) { return bits[static_cast<size_t>(piece.table)] == 0; });
    // Per piece, the number of ids of each part of its table; then the place of the next of these ids in the order.
    std::vector<std::vector<int64_t>> next(pieces.size());
    const auto for_each_id = [&](int64_t p, const auto& visit) {
      const Piece& piece = pieces[static_cast<size_t>(p)];
      const int shift = 64 - bits[static_cast<size_t>(piece.table)];
      for (int64_t i = piece.begin; i < piece.end; ++i) visit(i, next[static_cast<size_t>(p)][hashes[i] >> shift]);
    };
    for_each_task(static_cast<int64_t>(pieces.size()), [&](int64_t p) {
      const auto piece = static_cast<size_t>(p);
      next[piece].resize(size_t{1} << bits[static_cast<size_t>(pieces[piece].table)]);
      for_each_id(p, [](int64_t, int64_t& count) { ++count; });
    });
    int64_t* const order = order_.get();
    size_t from = 0;
    for (size_t t = 0; t < bits.size(); ++t) {
      int64_t place = offsets[t];
      if (bits[t] == 0) std::iota(order + place, order + offsets[t + 1], place);
      size_t until = from;
      while (until < pieces.size() && pieces[until].table == static_cast<int64_t>(t)) ++until;
      for (uint64_t prefix = 0; prefix < uint64_t{1} << bits[t]; ++prefix) {
        const int64_t begin = place;
        for (size_t p = from; p < until; ++p) place += std::exchange(next[p][prefix], place);
        if (bits[t] == 0) place = offsets[t + 1];
        parts_.push_back({static_cast<int64_t>(t), bits[t], prefix, order + begin, order + place});
      }
      from = until;
    }
    for_each_task(static_cast<int64_t>(pieces.size()),
                  [&](int64_t p) { for_each_id(p, [&](int64_t i, int64_t& place) { order[place++] = i; }); });
  }

  const std::vector<Part>& all() const { return parts_; }

  // Visits the ids of all parts in their maps, part by part on all threads; then calls visit_left_over(place, map) for
  // each id left over, one by one in the order of the parts. Allocates nothing.
  template <typename Visit, typename VisitLeftOver, typename ForEachTask>
  void visit_homes(const std::vector<IdMapView>& maps, const uint64_t* hashes, const Visit& visit,
                   const VisitLeftOver& visit_left_over, const ForEachTask& for_each_task) {
    for_each_task(static_cast<int64_t>(parts_.size()), [&](int64_t p) {
      Part& part = parts_[static_cast<size_t>(p)];
      part.end = part.visit_homes(maps[static_cast<size_t>(part.table)], hashes, visit);
    });
    for (const Part& part : parts_)
      for (const int64_t* place = part.begin; place < part.end; ++place)
        visit_left_over(*place, maps[static_cast<size_t>(part.table)]);
  }

 private:
  std::unique_ptr<int64_t[]> order_;
  std::vector<Part> parts_;
};

// The hashes of the ids of several tables, by the keys of their maps, computed on all threads.
template <typename ForEachTask>
std::unique_ptr<uint64_t[]> hashes_of(const std::vector<IdMapView>& maps, const int64_t* ids, const int64_t* offsets,
                                      const ForEachTask& for_each_task) {
  std::unique_ptr<uint64_t[]> hashes = uninitialised<uint64_t>(offsets[maps.size()]);
  const std::vector<Piece> pieces = pieces_of(offsets, static_cast<int64_t>(maps.size()));
  for_each_task(static_cast<int64_t>(pieces.size()), [&](int64_t p) {
    const Piece& piece = pieces[static_cast<size_t>(p)];
    const SlotHash hash = maps[static_cast<size_t>(piece.table)].hash;
    for (int64_t i = piece.begin; i < piece.end; ++i) hashes[static_cast<size_t>(i)] = hash(ids[i]);
  });
  return hashes;
}

}  // namespace torchrec_dyn
