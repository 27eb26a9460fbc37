// The distinct absent ids of a lookup on the CPU, in the order in which they first occur, on all threads.
#include "storage/collect_new_cpu.h"

#include <algorithm>
#include <array>
#include <bit>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "kernel.h"
#include "parallel.h"
#include "process_hash.h"
#include "storage/id_map.h"
#include "storage/parts_cpu.h"

namespace torchrec_dyn {
namespace {

// The occurrences of absent ids in table order, called absentees here. An absentee is the first of its id, or it
// repeats an earlier absentee.
struct Absentees {
  explicit Absentees(int64_t count)
      : positions(uninitialised<int64_t>(count)),
        hashes(uninitialised<uint64_t>(count)),
        firsts(uninitialised<int64_t>(count)),
        numbers(uninitialised<int64_t>(count)) {}

  std::unique_ptr<int64_t[]> positions;  // in the batch
  std::unique_ptr<uint64_t[]> hashes;
  std::unique_ptr<int64_t[]> firsts;   // the first absentee of the same id
  std::unique_ptr<int64_t[]> numbers;  // of a first absentee: the occurrences of its id, later its place in new_ids
};

// Calls visit(i, place) for each i in [begin, end) that is_wanted(i), without a branch that depends on a single i.
// Places count from `place` on.
template <typename IsWanted, typename Visit>
void for_wanted(int64_t begin, int64_t end, int64_t place, const IsWanted& is_wanted, const Visit& visit) {
  constexpr int64_t kRun = 512;
  std::array<int64_t, kRun + 1> kept;  // one more is written but not kept
  for (int64_t run = begin; run < end; run += kRun) {
    size_t count = 0;
    for (int64_t i = run; i < std::min(run + kRun, end); ++i) {
      kept[count] = i;
      count += is_wanted(i);
    }
    for (size_t i = 0; i < count; ++i) visit(kept[i], place++);
  }
}

// Lists the absentees of a piece of the batch from `next` on, and writes the new_index of ids with a row.
void list_absent(const int64_t* ids, const int64_t* rows, const Piece& piece, int64_t next, const Absentees& list,
                 int64_t* new_index) {
  const SlotHash hash = process_hash();
  int64_t* const positions = list.positions.get();
  uint64_t* const hashes = list.hashes.get();
  std::fill(new_index + piece.begin, new_index + piece.end, kNoRow);
  const auto is_absent = [rows](int64_t i) { return rows[i] == kNoRow; };
  for_wanted(piece.begin, piece.end, next, is_absent, [=](int64_t i, int64_t absentee) {
    positions[absentee] = i;
    hashes[absentee] = hash(ids[i]);
  });
}

// Finds the first absentees among those of one part, and counts the occurrences of their ids. A hash table with chains,
// as in lookup/row_runs_cpu.h: whether an id is new cannot be predicted, so no branch depends on it.
void find_firsts(const int64_t* ids, const Part& part, const Absentees& list) {
  // Absentees are counted from 1; 0 is none.
  const auto count = static_cast<uint32_t>(part.end - part.begin);
  const size_t room = size_t{count} + 1, slots = std::bit_ceil(2 * room);
  const int shift = 64 - std::countr_zero(slots);
  const auto id_memory = std::make_unique_for_overwrite<int64_t[]>(room);
  const auto memory = std::make_unique_for_overwrite<uint32_t[]>(slots + 2 * room);
  int64_t* const id_of = id_memory.get();
  uint32_t* const last = memory.get();    // the last first absentee of each slot
  uint32_t* const before = last + slots;  // the one before in the same slot
  uint32_t* const repeats = before + room;
  std::fill(last, last + slots, 0u);
  const int64_t* const order = part.begin - 1;
  const int64_t* const positions = list.positions.get();
  const uint64_t* const hashes = list.hashes.get();
  int64_t* const firsts = list.firsts.get();
  constexpr uint32_t kAhead = 16;
  std::array<uint64_t, kAhead> ring;  // the slots of the next absentees
  const auto prepare = [&](uint32_t i) __attribute__((always_inline)) {
    const uint64_t slot = part.rest(hashes[order[i]]) >> shift;
    ring[i % kAhead] = slot;
    __builtin_prefetch(last + slot, 1, 3);
  };
  for (uint32_t i = 1; i <= std::min(kAhead, count); ++i) prepare(i);
  for (uint32_t i = 1; i <= count; ++i) {
    const int64_t id = ids[positions[order[i]]];
    const uint64_t slot = ring[i % kAhead];
    prepare(std::min(i + kAhead, count));
    uint32_t first = before[i] = last[slot];
    id_of[i] = id_of[0] = id;                          // [0] ends the search
    while (id_of[first] != id) first = before[first];  // rare
    const bool is_new = first == 0;
    last[slot] = is_new ? i : before[i];
    first += is_new ? i : 0;
    repeats[i] = 0;
    ++repeats[first];
    firsts[order[i]] = order[first];
  }
  int64_t* const numbers = list.numbers.get();
  for (uint32_t i = 1; i <= count; ++i) numbers[order[i]] = repeats[i];
}

// Parts small enough for the cache, and four for each thread. The result of the op does not depend on the cut.
std::vector<int> bits_of_tables(const std::vector<int64_t>& offsets) {
  constexpr int64_t kLeast = 1 << 11, kMost = 1 << 16;
  const int64_t threads = thread_count();
  const int64_t least = threads <= 1 ? kMost : std::clamp(offsets.back() / (4 * threads), kLeast, kMost);
  std::vector<int> bits;
  for (size_t t = 0; t + 1 < offsets.size(); ++t) bits.push_back(part_bits(offsets[t + 1] - offsets[t], least));
  return bits;
}

}  // namespace

CollectedIds collect_new(const int64_t* ids, const int64_t* rows, const int64_t* table_offsets, int64_t tables,
                         const int64_t* frozen) {
  Tensor new_index = new_int64(table_offsets[tables]);
  int64_t* index = mutable_data<int64_t>(new_index);
  std::vector<Piece> pieces = pieces_of(table_offsets, tables);
  if (frozen != nullptr)
    std::erase_if(pieces, [&](const Piece& piece) {
      if (frozen[piece.table] != 0) std::fill(index + piece.begin, index + piece.end, kNoRow);
      return frozen[piece.table] != 0;
    });
  const auto for_each_piece = [&](const auto& task) {
    for_each_task(static_cast<int64_t>(pieces.size()), [&](int64_t p) {
      const auto piece = static_cast<size_t>(p);
      task(pieces[piece], piece);
    });
  };
  // Turns a number of each piece, counts[piece + 1], into the sum of the earlier numbers, and returns the sum of the
  // numbers before each table.
  const auto add_up = [&](std::vector<int64_t>& counts) {
    std::vector<int64_t> offsets(static_cast<size_t>(tables) + 1);
    for (size_t piece = 0; piece < pieces.size(); ++piece) {
      counts[piece + 1] += counts[piece];
      offsets[static_cast<size_t>(pieces[piece].table) + 1] = counts[piece + 1];
    }
    for (size_t t = 1; t < offsets.size(); ++t) offsets[t] = std::max(offsets[t], offsets[t - 1]);
    return offsets;
  };

  std::vector<int64_t> absent(pieces.size() + 1);  // the first absentee of each piece
  for_each_piece(
      [&](const Piece& piece, size_t p) { absent[p + 1] = std::count(rows + piece.begin, rows + piece.end, kNoRow); });
  const std::vector<int64_t> absent_offsets = add_up(absent);
  const Absentees list(absent.back());
  for_each_piece([&](const Piece& piece, size_t p) { list_absent(ids, rows, piece, absent[p], list, index); });
  const Parts parts(absent_offsets.data(), bits_of_tables(absent_offsets), list.hashes.get(),
                    [](int64_t count, const auto& task) { for_each_task(count, task); });
  for_each_task(static_cast<int64_t>(parts.all().size()),
                [&](int64_t p) { find_firsts(ids, parts.all()[static_cast<size_t>(p)], list); });

  const auto for_each_absentee = [&](const auto& task) {
    for_each_piece([&](const Piece&, size_t p) {
      for (auto i = static_cast<size_t>(absent[p]); i < static_cast<size_t>(absent[p + 1]); ++i)
        task(p, i, static_cast<size_t>(list.firsts[i]));
    });
  };
  std::vector<int64_t> fresh(pieces.size() + 1);  // the place in new_ids of the next new id of each piece
  for_each_absentee([&](size_t p, size_t i, size_t first) { fresh[p + 1] += i == first; });
  const std::vector<int64_t> offsets = add_up(fresh);
  Tensor new_ids = new_int64(fresh.back());
  Tensor new_counts = new_int64(fresh.back());
  int64_t* new_id = mutable_data<int64_t>(new_ids);
  int64_t* new_count = mutable_data<int64_t>(new_counts);
  for_each_piece([&](const Piece&, size_t p) {
    const int64_t* const positions = list.positions.get();
    const int64_t* const firsts = list.firsts.get();
    int64_t* const numbers = list.numbers.get();
    const auto is_first = [firsts](int64_t i) { return firsts[i] == i; };
    for_wanted(absent[p], absent[p + 1], fresh[p], is_first, [=](int64_t i, int64_t place) {
      new_id[place] = ids[positions[i]];
      new_count[place] = std::exchange(numbers[i], place);
    });
  });
  for_each_absentee([&](size_t, size_t i, size_t first) { index[list.positions[i]] = list.numbers[first]; });
  return {new_ids, new_counts, new_index, offsets};
}

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> collect_new_ids(const Tensor& ids, const Tensor& rows,
                                                           const Tensor& table_offsets) {
  const int64_t tables = table_offsets.numel() - 1;
  TORCHREC_DYN_CHECK(tables >= 0, "collect_new: expected table_offsets [T + 1], got none.");
  check_tensor("collect_new", "ids", ids, ScalarType::Long);
  check_numbers("collect_new", "rows", rows, ScalarType::Long, ids.numel());
  check_table_offsets("collect_new", table_offsets, tables, ids.numel());
  const CollectedIds found = collect_new(const_data<int64_t>(ids), const_data<int64_t>(rows),
                                         const_data<int64_t>(table_offsets), tables, nullptr);
  Tensor new_offsets = new_int64(tables + 1);
  std::copy(found.offsets.begin(), found.offsets.end(), mutable_data<int64_t>(new_offsets));
  return {found.ids, found.counts, new_offsets, found.index};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) { m.impl(TORCHREC_DYN_KERNEL("collect_new", &collect_new_ids)); }

}  // namespace torchrec_dyn
