// The distinct absent ids of a lookup on the CPU, in the order in which they first occur, on all threads.
#include <algorithm>
#include <array>
#include <memory>
#include <tuple>
#include <vector>

#include "checks.h"
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

// Lists the absentees of a piece of the batch from `next` on, and writes the new_index of ids with a row.
void list_absent(const int64_t* ids, const int64_t* rows, const Piece& piece, size_t next, const Absentees& list,
                 int64_t* new_index) {
  const SlotHash hash = process_hash();
  constexpr int64_t kRun = 512;
  std::array<int64_t, kRun + 1> kept;  // without a branch, so one more is written but not kept
  for (int64_t run = piece.begin; run < piece.end; run += kRun) {
    size_t count = 0;
    for (int64_t i = run; i < std::min(run + kRun, piece.end); ++i) {
      new_index[i] = kNoRow;
      kept[count] = i;
      count += rows[i] == kNoRow;
    }
    for (size_t i = 0; i < count; ++i, ++next) {
      list.positions[next] = kept[i];
      list.hashes[next] = hash(ids[kept[i]]);
    }
  }
}

// Finds the first absentees among those of one part, and counts the occurrences of their ids.
void find_firsts(const int64_t* ids, const Part& part, const Absentees& list) {
  std::vector<Slot> slots(std::bit_ceil(static_cast<uint64_t>(2 * (part.end - part.begin) + kLineSlots)));
  const SlotArray seen{slots.data(), static_cast<int64_t>(slots.size())};
  for (const int64_t* place = part.begin; place < part.end; ++place) {
    const auto absentee = static_cast<size_t>(*place);
    const int64_t first = find_or_insert(seen, ids[list.positions[absentee]], *place, part.rest(list.hashes[absentee]));
    if (first == *place) list.numbers[absentee] = 0;
    list.firsts[absentee] = first;
    ++list.numbers[static_cast<size_t>(first)];
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> collect_new(const Tensor& ids, const Tensor& rows,
                                                       const Tensor& table_offsets) {
  const int64_t tables = table_offsets.numel() - 1;
  TORCHREC_DYN_CHECK(tables >= 0, "collect_new: expected table_offsets [T + 1], got none.");
  check_tensor("collect_new", "ids", ids, ScalarType::Long);
  check_tensor("collect_new", "rows", rows, ScalarType::Long);
  check_size("collect_new", "the number of rows", ids.numel(), rows.numel());
  check_table_offsets("collect_new", table_offsets, tables, ids.numel());
  const int64_t* id = const_data<int64_t>(ids);
  const int64_t* row = const_data<int64_t>(rows);
  Tensor new_index = new_int64(ids.numel());
  int64_t* index = mutable_data<int64_t>(new_index);

  const std::vector<Piece> pieces = pieces_of(const_data<int64_t>(table_offsets), tables);
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
      [&](const Piece& piece, size_t p) { absent[p + 1] = std::count(row + piece.begin, row + piece.end, kNoRow); });
  const std::vector<int64_t> absent_offsets = add_up(absent);
  const Absentees list(absent.back());
  for_each_piece(
      [&](const Piece& piece, size_t p) { list_absent(id, row, piece, static_cast<size_t>(absent[p]), list, index); });
  std::vector<int> bits;
  for (size_t t = 0; t + 1 < absent_offsets.size(); ++t)
    bits.push_back(part_bits(absent_offsets[t + 1] - absent_offsets[t], 512));
  const Parts parts(absent_offsets.data(), bits, list.hashes.get(),
                    [](int64_t count, const auto& task) { for_each_task(count, task); });
  for_each_task(static_cast<int64_t>(parts.all().size()),
                [&](int64_t p) { find_firsts(id, parts.all()[static_cast<size_t>(p)], list); });

  const auto for_each_absentee = [&](const auto& task) {
    for_each_piece([&](const Piece&, size_t p) {
      for (auto i = static_cast<size_t>(absent[p]); i < static_cast<size_t>(absent[p + 1]); ++i)
        task(p, i, static_cast<size_t>(list.firsts[i]));
    });
  };
  std::vector<int64_t> fresh(pieces.size() + 1);  // the place in new_ids of the next new id of each piece
  for_each_absentee([&](size_t p, size_t i, size_t first) { fresh[p + 1] += i == first; });
  const std::vector<int64_t> offsets = add_up(fresh);
  Tensor new_offsets = new_int64(tables + 1);
  Tensor new_ids = new_int64(fresh.back());
  Tensor new_counts = new_int64(fresh.back());
  std::copy(offsets.begin(), offsets.end(), mutable_data<int64_t>(new_offsets));
  int64_t* new_id = mutable_data<int64_t>(new_ids);
  int64_t* new_count = mutable_data<int64_t>(new_counts);
  for_each_absentee([&](size_t p, size_t i, size_t first) {
    if (i != first) return;
    const int64_t place = fresh[p]++;
    new_id[place] = id[list.positions[i]];
    new_count[place] = std::exchange(list.numbers[i], place);
  });
  for_each_absentee([&](size_t, size_t i, size_t first) { index[list.positions[i]] = list.numbers[first]; });
  return {new_ids, new_counts, new_offsets, new_index};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) { m.impl(TORCHREC_DYN_KERNEL("collect_new", &collect_new)); }

}  // namespace torchrec_dyn
