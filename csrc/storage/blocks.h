// Rows live in blocks of 2^shift rows, so that a table grows by appending a block and no row ever moves.
//
// An op over several tables takes one flat list of blocks and `layout` [T, 4] int64, one line a table:
//   first block in the list, number of blocks, shift, columns of a row.
#pragma once

#include <cstdint>
#include <vector>

#include "checks.h"
#include "simd.h"
#include "storage/row_types.h"

namespace torchrec_dyn {

template <typename T>
struct RowBlocks {
  std::vector<T*> blocks;
  int64_t shift = 0;
  int64_t columns = 0;

  int64_t capacity() const { return static_cast<int64_t>(blocks.size()) << shift; }
  T* row(int64_t index) const {
    return blocks[static_cast<size_t>(index >> shift)] + (index & ((int64_t{1} << shift) - 1)) * columns;
  }
};

// Asks for a row into L2: the core has far more misses in flight there than in L1 (measured: 22 against 35 ns for a
// random row of 256 bytes, docs/performance.md). Callers ask in bursts, some thirty rows before they use them.
template <typename T>
TORCHREC_DYN_INLINE void prefetch_row(const RowBlocks<T>& table, int64_t index) {
  const auto* byte = reinterpret_cast<const char*>(table.row(index));
  const int64_t bytes = table.columns * static_cast<int64_t>(sizeof(T));
  __builtin_prefetch(byte, 0, 2);
  if (bytes > 64) {
    __builtin_prefetch(byte + 64, 0, 2);
    if (bytes > 128) {
      __builtin_prefetch(byte + 128, 0, 2);
      if (bytes > 192) __builtin_prefetch(byte + 192, 0, 2);
    }
  }
  // Eight lines suffice: the hardware's own prefetcher follows a longer row.
  for (int64_t offset = 256; offset < bytes && offset < 512; offset += 64) __builtin_prefetch(byte + offset, 0, 2);
}

struct TableLayout {
  int64_t first_block;
  int64_t blocks;
  int64_t shift;
  int64_t columns;
};

// Bounds under which no product of the three overflows.
constexpr int64_t kMostBlocks = int64_t{1} << 31;

inline void check_row_shape(const char* op, int64_t shift, int64_t columns) {
  STD_TORCH_CHECK(shift >= 0 && shift < 32 && columns > 0 && columns < (int64_t{1} << 31), op,
                  ": expected shift in [0, 32) and columns in [1, 2^31), got ", shift, " and ", columns, ".");
}

inline std::vector<TableLayout> read_layout(const char* op, const Tensor& layout) {
  check_tensor(op, "layout", layout, ScalarType::Long);
  STD_TORCH_CHECK(layout.dim() == 2 && layout.size(1) == 4, op, ": expected layout of shape [T, 4], got ", layout.dim(),
                  " dimensions.");
  const int64_t* line = const_data<int64_t>(layout);
  std::vector<TableLayout> tables;
  for (int64_t t = 0; t < layout.size(0); ++t, line += 4) {
    STD_TORCH_CHECK(line[0] >= 0 && line[0] < kMostBlocks && line[1] >= 0 && line[1] < kMostBlocks, op,
                    ": expected a layout of block and count in [0, 2^31), got ", line[0], " and ", line[1], ".");
    check_row_shape(op, line[2], line[3]);
    tables.push_back({line[0], line[1], line[2], line[3]});
  }
  return tables;
}

template <typename T>
constexpr ScalarType scalar_type_of();
template <>
constexpr ScalarType scalar_type_of<float>() {
  return ScalarType::Float;
}
template <>
constexpr ScalarType scalar_type_of<int32_t>() {
  return ScalarType::Int;
}
template <>
constexpr ScalarType scalar_type_of<int64_t>() {
  return ScalarType::Long;
}
template <>
constexpr ScalarType scalar_type_of<Float16>() {
  return ScalarType::Half;
}
template <>
constexpr ScalarType scalar_type_of<BFloat16>() {
  return ScalarType::BFloat16;
}

// The blocks of one table out of the flat list. `columns` is 1 for state that a row shares.
template <typename T>
RowBlocks<T> row_blocks(const char* op, const char* name, const std::vector<Tensor>& list, const TableLayout& table,
                        int64_t columns) {
  RowBlocks<T> rows;
  rows.shift = table.shift;
  rows.columns = columns;
  STD_TORCH_CHECK(table.first_block + table.blocks <= static_cast<int64_t>(list.size()), op, ": expected ",
                  table.first_block + table.blocks, " blocks of ", name, ", got ", list.size(), ".");
  for (int64_t b = 0; b < table.blocks; ++b) {
    const Tensor& block = list[static_cast<size_t>(table.first_block + b)];
    check_tensor(op, name, block, scalar_type_of<T>());
    check_size(op, "the elements of a block", columns << table.shift, block.numel());
    rows.blocks.push_back(static_cast<T*>(block.mutable_data_ptr()));
  }
  return rows;
}

// Calls body(T{}) with the element type of the blocks; float where there is none.
template <typename Body>
void dispatch_row_type(const char* op, const std::vector<Tensor>& blocks, const Body& body) {
  const ScalarType type = blocks.empty() ? ScalarType::Float : blocks.front().scalar_type();
  switch (type) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::Half:
      return body(Float16{});
    case ScalarType::BFloat16:
      return body(BFloat16{});
    default:
      STD_TORCH_CHECK(false, op, ": expected rows of dtype float32, float16 or bfloat16, got ", dtype_name(type), ".");
  }
}

}  // namespace torchrec_dyn
