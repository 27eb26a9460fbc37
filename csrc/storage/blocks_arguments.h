// Blocks as arguments of an op: flat lists of tensors and a layout, checked, and read as the views of storage/blocks.h.
#pragma once

#include <cstdint>
#include <vector>

#include "checks.h"
#include "storage/blocks.h"
#include "storage/row_types.h"

namespace torchrec_dyn {

// A bound on the number of blocks under which `blocks << shift` does not overflow.
constexpr int64_t kMostBlocks = int64_t{1} << 31;

inline void check_row_shape(const char* op, int64_t shift, int64_t columns) {
  TORCHREC_DYN_CHECK(shift >= 0 && shift < 32 && columns > 0 && columns < (int64_t{1} << 31), op,
                     ": expected shift in [0, 32) and columns in [1, 2^31), got ", shift, " and ", columns, ".");
}

// The table with the rows that its last block lacks, as BlockList checks them.
inline TableLayout with_last_block(TableLayout table, const std::vector<Tensor>& blocks, int64_t columns) {
  const int64_t end = table.first_block + table.blocks, whole = int64_t{1} << table.shift;
  if (table.blocks == 0 || end > static_cast<int64_t>(blocks.size())) return table;
  const int64_t elements = blocks[static_cast<size_t>(end - 1)].numel(), rows = elements / columns;
  if (elements % columns == 0 && rows > 0 && rows < whole) table.missing = whole - rows;
  return table;
}

// The layout of a call that takes the blocks of one table only.
inline TableLayout layout_of_one(const char* op, const std::vector<Tensor>& blocks, int64_t shift, int64_t columns) {
  check_row_shape(op, shift, columns);
  return with_last_block({0, static_cast<int64_t>(blocks.size()), shift, columns}, blocks, columns);
}

// `blocks`: the list that the layout describes; its rows have one word if `has_words`, else the layout's columns.
inline std::vector<TableLayout> read_layout(const char* op, const Tensor& layout, const std::vector<Tensor>& blocks,
                                            bool has_words = false) {
  check_tensor(op, "layout", layout, ScalarType::Long);
  TORCHREC_DYN_CHECK(layout.dim() == 2 && layout.size(1) == 4, op, ": expected layout of shape [T, 4], got ",
                     layout.dim(), " dimensions.");
  const int64_t* line = const_data<int64_t>(layout);
  std::vector<TableLayout> tables;
  for (int64_t t = 0; t < layout.size(0); ++t, line += 4) {
    TORCHREC_DYN_CHECK(line[0] >= 0 && line[0] < kMostBlocks && line[1] >= 0 && line[1] < kMostBlocks, op,
                       ": expected a layout of block and count in [0, 2^31), got ", line[0], " and ", line[1], ".");
    check_row_shape(op, line[2], line[3]);
    tables.push_back(with_last_block({line[0], line[1], line[2], line[3]}, blocks, has_words ? 1 : line[3]));
  }
  return tables;
}

// The dtype of tensors whose numbers are T. torch has few operators for unsigned words, so tensors keep them as int64,
// which C++ may read as unsigned.
template <typename T>
constexpr ScalarType kDtypeOf = ScalarType::Long;
template <>
inline constexpr ScalarType kDtypeOf<float> = ScalarType::Float;
template <>
inline constexpr ScalarType kDtypeOf<Float16> = ScalarType::Half;
template <>
inline constexpr ScalarType kDtypeOf<BFloat16> = ScalarType::BFloat16;
template <>
inline constexpr ScalarType kDtypeOf<int32_t> = ScalarType::Int;
template <>
inline constexpr ScalarType kDtypeOf<uint8_t> = ScalarType::Byte;

// A flat list of blocks. Owns the pointers that the views of its tables read; for kernels of another device the views
// need a copy of the pointers there.
template <typename T>
class BlockList {
 public:
  BlockList(const char* op, const char* name, const std::vector<Tensor>& blocks, const Device& device = DeviceType::CPU)
      : op_(op), name_(name), blocks_(blocks), device_(device), pointers_(blocks.size()) {}

  // `columns` is 1 for a state with one number per row.
  RowBlocks<T> rows(const TableLayout& table, int64_t columns) {
    TORCHREC_DYN_CHECK(table.first_block + table.blocks <= static_cast<int64_t>(blocks_.size()), op_, ": expected ",
                       table.first_block + table.blocks, " blocks of ", name_, ", got ", blocks_.size(), ".");
    for (int64_t b = 0; b < table.blocks; ++b) {
      const auto place = static_cast<size_t>(table.first_block + b);
      check_tensor(op_, name_, blocks_[place], kDtypeOf<T>, device_);
      const int64_t missing = b + 1 == table.blocks ? columns * table.missing : 0;
      check_size(op_, "the elements of a block", (columns << table.shift) - missing, blocks_[place].numel());
      pointers_[place] = static_cast<T*>(blocks_[place].mutable_data_ptr());
    }
    return {pointers_.data() + table.first_block, table.shift, columns, table.capacity()};
  }

  std::vector<RowBlocks<T>> rows_of(const std::vector<TableLayout>& tables) {
    std::vector<RowBlocks<T>> all;
    for (const TableLayout& table : tables) all.push_back(rows(table, table.columns));
    return all;
  }

  WordBlocks<T> words(const TableLayout& table) {
    const RowBlocks<T> single = rows(table, 1);
    return {single.blocks, single.shift, single.capacity};
  }

  const std::vector<T*>& pointers() const { return pointers_; }

 private:
  const char* op_;
  const char* name_;
  const std::vector<Tensor>& blocks_;
  Device device_;
  std::vector<T*> pointers_;
};

// Calls body(T{}) with the element type of rows.
template <typename Body>
void dispatch_row_type(const char* op, ScalarType type, const Body& body) {
  switch (type) {
    case ScalarType::Float:
      return body(float{});
    case ScalarType::Half:
      return body(Float16{});
    case ScalarType::BFloat16:
      return body(BFloat16{});
    default:
      TORCHREC_DYN_CHECK(false, op, ": expected rows of dtype float32, float16 or bfloat16, got ", dtype_name(type),
                         ".");
  }
}

// Calls body(T{}) with the element type of the blocks; float if there are no blocks.
template <typename Body>
void dispatch_row_type(const char* op, const std::vector<Tensor>& blocks, const Body& body) {
  dispatch_row_type(op, blocks.empty() ? ScalarType::Float : blocks.front().scalar_type(), body);
}

}  // namespace torchrec_dyn
