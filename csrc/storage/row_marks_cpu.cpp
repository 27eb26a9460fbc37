// The marks of rows on the CPU.
#include "storage/row_marks.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <tuple>
#include <vector>

#include "parallel.h"
#include "storage/parts_cpu.h"
#include "storage/row_marks_arguments.h"

namespace torchrec_dyn {
namespace {

constexpr int64_t kGrain = 4096;

// True if every row lies below `capacity`.
TORCHREC_DYN_SIMD bool are_below(const int64_t* rows, int64_t count, int64_t capacity) noexcept {
  int64_t highest = -1;
  for (int64_t i = 0; i < count; ++i) highest = rows[i] > highest ? rows[i] : highest;
  return highest < capacity;
}

void mark_rows_(const MarkRowsCall& call) {
  BlockList<int32_t> blocks(call.kOp, "marks", call.marks);
  const std::vector<TableWords<int32_t>> tables = call.read(blocks, DeviceType::CPU);
  const auto count = static_cast<int64_t>(tables.size());
  const int64_t* row = const_data<int64_t>(call.rows);
  const int64_t* offset = const_data<int64_t>(call.table_offsets);
  for (int64_t t = 0; t < count; ++t) {
    const int64_t capacity = tables[static_cast<size_t>(t)].words.capacity;
    // All rows are checked before the first row is marked: an error changes nothing.
    check_marked_rows(call.kOp, capacity == 0 || are_below(row + offset[t], offset[t + 1] - offset[t], capacity),
                      capacity, t);
  }
  for_each_range(call.rows.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = std::upper_bound(offset, offset + count + 1, begin) - offset - 1; begin < end; ++t) {
      const int64_t stop = std::min(end, offset[t + 1]);
      const TableWords<int32_t>& table = tables[static_cast<size_t>(t)];
      if (table.words.capacity > 0) mark_rows(table.words, row + begin, stop - begin, static_cast<int32_t>(table.now));
      begin = stop;
    }
  });
}

// Writes the places in [begin, end) of rows whose bit is clear to `found`, and returns how many there are: without a
// branch, so `found` has room for one more. Negative rows are skipped; the table has marks. The bits have left the
// core's caches since the last step.
TORCHREC_DYN_SIMD int64_t find_clear(const MarkBits& shared, const int64_t* rows, int64_t begin, int64_t end,
                                     int64_t* found) noexcept {
  constexpr int64_t kAhead = 24;
  const MarkBits marks = shared;
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) __builtin_prefetch(marks.byte(std::max<int64_t>(rows[i + kAhead], 0)), 0, 2);
    const int64_t row = std::max<int64_t>(rows[i], 0);
    const bool is_clear = (*marks.byte(row) & mark_of(row)) == 0;
    found[count] = i;
    count += static_cast<int64_t>(is_clear) & static_cast<int64_t>(rows[i] >= 0);
  }
  return count;
}

// Sets the bits of the rows at `places` [0, count), and keeps the places whose bit was clear: the first place of each
// row. Returns how many are kept.
int64_t mark_clear(const MarkBits& marks, const int64_t* rows, int64_t* places, int64_t count) {
  int64_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t place = places[i], row = rows[place];
    uint8_t* byte = marks.byte(row);
    const bool is_first = (*byte & mark_of(row)) == 0;
    *byte |= mark_of(row);
    places[kept] = place;
    kept += static_cast<int64_t>(is_first);
  }
  return kept;
}

// Threads find the clear bits first, which writes nothing. Few steps find any: these are set on one thread.
std::tuple<Tensor, Tensor> mark_new_(const Tensor& rows, const Tensor& table_offsets, std::vector<Tensor> marks,
                                     const Tensor& layout) {
  const char* op = "mark_new_";
  check_tensor(op, "rows", rows, ScalarType::Long);
  const std::vector<TableLayout> tables = read_layout(op, layout, {}, true);
  const auto count = static_cast<int64_t>(tables.size());
  check_table_offsets(op, table_offsets, count, rows.numel());
  const int64_t* row = const_data<int64_t>(rows);
  const int64_t* offset = const_data<int64_t>(table_offsets);
  BlockList<uint8_t> blocks(op, "marks", marks);
  std::vector<MarkBits> bits;
  for (int64_t t = 0; t < count; ++t) {
    const TableLayout& table = tables[static_cast<size_t>(t)];
    TORCHREC_DYN_CHECK(table.blocks == 0 || table.shift >= kLeastMarkShift, op, ": expected shift >= ", kLeastMarkShift,
                       " in layout, got ", table.shift, ".");
    bits.push_back(bits_of(blocks.words(table)));
    const int64_t capacity = bits.back().capacity;
    check_marked_rows(op, capacity == 0 || are_below(row + offset[t], offset[t + 1] - offset[t], capacity), capacity,
                      t);
  }
  SeparateMemory().writes(marks).reads(rows).reads(table_offsets).check(op);

  const std::vector<Piece> pieces = pieces_of(offset, count);
  std::vector<std::vector<int64_t>> found(pieces.size());
  for_each_task(static_cast<int64_t>(pieces.size()), [&](int64_t p) {
    const Piece& piece = pieces[static_cast<size_t>(p)];
    const MarkBits& table = bits[static_cast<size_t>(piece.table)];
    if (table.capacity == 0) return;
    const auto places = uninitialised<int64_t>(piece.end - piece.begin + 1);
    const int64_t clear = find_clear(table, row, piece.begin, piece.end, places.get());
    found[static_cast<size_t>(p)].assign(places.get(), places.get() + clear);
  });
  const int64_t most = std::transform_reduce(found.begin(), found.end(), int64_t{0}, std::plus<>(),
                                             [](const auto& places) { return static_cast<int64_t>(places.size()); });
  Tensor places = new_int64(most);
  Tensor begins = new_int64(count + 1);
  int64_t* place = mutable_data<int64_t>(places);
  int64_t* begin = mutable_data<int64_t>(begins);
  std::fill(begin, begin + count + 1, int64_t{0});
  int64_t kept = 0;
  for (size_t p = 0; p < pieces.size(); ++p) {
    std::copy(found[p].begin(), found[p].end(), place + kept);
    kept += mark_clear(bits[static_cast<size_t>(pieces[p].table)], row, place + kept,
                       static_cast<int64_t>(found[p].size()));
    begin[pieces[p].table + 1] = kept;
  }
  for (int64_t t = 0; t < count; ++t) begin[t + 1] = std::max(begin[t], begin[t + 1]);
  std::fill(place + kept, place + most, int64_t{-1});
  return {places, begins};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("mark_rows_", &mark_rows_));
  m.impl(TORCHREC_DYN_KERNEL("mark_new_", &mark_new_));
}

}  // namespace torchrec_dyn
