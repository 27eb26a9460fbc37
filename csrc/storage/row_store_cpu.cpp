// Single rows on the CPU: initial rows, reads and writes by row. One table in each call.
#include <algorithm>
#include <optional>

#include "kernel.h"
#include "output_memory.h"
#include "parallel.h"
#include "storage/initial_writes_cpu.h"
#include "storage/row_access_cpu.h"
#include "storage/row_store_arguments.h"
#include "storage/streamed_rows_cpu.h"

namespace torchrec_dyn {
namespace {

constexpr int64_t kGrain = 512;
constexpr int64_t kMostCached = 8 << 20;  // larger outputs are written past the caches
constexpr int64_t kBurst = 32;            // rows prefetched together, before their values are computed

TORCHREC_DYN_SIMD bool are_between(const int64_t* rows, int64_t count, int64_t lowest, int64_t end) noexcept {
  int64_t outside = 0;  // a sum, not a branch: the compiler makes vectors of it
  for (int64_t i = 0; i < count; ++i) outside += (rows[i] < lowest) | (rows[i] >= end);
  return outside == 0;
}

void check_rows(const char* op, const Tensor& rows, int64_t lowest, int64_t capacity) {
  check_tensor(op, "rows", rows, ScalarType::Long);
  const int64_t* row = const_data<int64_t>(rows);
  if (are_between(row, rows.numel(), lowest, capacity)) return;
  for (int64_t i = 0; i < rows.numel(); ++i) check_row(op, row[i], lowest, capacity);
}

void init_rows_(const Tensor& ids, const Tensor& rows, std::vector<Tensor> blocks, int64_t shift, int64_t columns,
                int64_t first_column, int64_t kind, std::vector<double> parameters, int64_t key) {
  check_tensor("init_rows_", "ids", ids, ScalarType::Long);
  check_size("init_rows_", "the number of rows", ids.numel(), rows.numel());
  check_size("init_rows_", "the number of parameters", 6, static_cast<int64_t>(parameters.size()));
  const InitialRows initial = initial_rows_of("init_rows_", first_column, kind, parameters.data());
  dispatch_row_type("init_rows_", blocks, [&](auto zero) {
    using T = decltype(zero);
    BlockList<T> list("init_rows_", "blocks", blocks);
    const RowBlocks<T> table = list.rows(layout_of_one("init_rows_", blocks, shift, columns), columns);
    check_rows("init_rows_", rows, 0, table.capacity);
    SeparateMemory().writes(blocks).reads(ids).reads(rows).check("init_rows_");
    const int64_t* id = const_data<int64_t>(ids);
    const int64_t* row = const_data<int64_t>(rows);
    write_initial_rows(initial, static_cast<uint64_t>(key), first_column, id, row, rows.numel(), table);
  });
}

Tensor gather_rows(const Tensor& rows, std::vector<Tensor> blocks, int64_t shift, int64_t columns, ScalarType dtype) {
  check_gathered_type(blocks, dtype);
  std::optional<Tensor> out;
  dispatch_row_type("gather_rows", dtype, [&](auto zero) {
    using T = decltype(zero);
    BlockList<T> list("gather_rows", "blocks", blocks);
    const RowBlocks<T> table = list.rows(layout_of_one("gather_rows", blocks, shift, columns), columns);
    check_rows("gather_rows", rows, -1, table.capacity);
    out = new_output(rows.numel(), dtype, columns);
    const int64_t* row = const_data<int64_t>(rows);
    T* values = mutable_data<T>(*out);
    const int64_t bytes = rows.numel() * columns * static_cast<int64_t>(sizeof(T));
    for_each_range(rows.numel(), kGrain, [&](int64_t begin, int64_t end) {
      const RowStream stream(bytes > kMostCached ? bytes : 0);
      for (int64_t i = begin; i < end; ++i) {
        if ((i - begin) % kBurst == 0)  // rows in canonical order lie anywhere
          for (int64_t next = i + kBurst; next < end && next < i + 2 * kBurst; ++next)
            if (row[next] >= 0) prefetch_row(table, row[next]);
        if (row[i] < 0)
          std::fill(values + i * columns, values + (i + 1) * columns, T{});
        else
          stream.write(table.row(row[i]), columns, values + i * columns);
      }
    });
  });
  return *out;
}

void scatter_rows_(const Tensor& rows, const Tensor& values, std::vector<Tensor> blocks, int64_t shift,
                   int64_t columns) {
  check_scattered_size(rows, values, shift, columns);
  dispatch_row_type("scatter_rows_", blocks, [&](auto zero) {
    using T = decltype(zero);
    check_tensor("scatter_rows_", "values", values, kDtypeOf<T>);
    BlockList<T> list("scatter_rows_", "blocks", blocks);
    const RowBlocks<T> table = list.rows(layout_of_one("scatter_rows_", blocks, shift, columns), columns);
    check_rows("scatter_rows_", rows, 0, table.capacity);
    SeparateMemory().writes(blocks).reads(rows).reads(values).check("scatter_rows_");
    const int64_t* row = const_data<int64_t>(rows);
    const T* value = const_data<T>(values);
    // In order and on one thread: if a row is given twice, its last values stay.
    const RowStream stream(values.numel() * static_cast<int64_t>(sizeof(T)));
    for (int64_t i = 0; i < rows.numel(); ++i) stream.write(value + i * columns, columns, table.row(row[i]));
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_KERNEL("init_rows_", &init_rows_));
  m.impl(TORCHREC_DYN_KERNEL("gather_rows", &gather_rows));
  m.impl(TORCHREC_DYN_KERNEL("scatter_rows_", &scatter_rows_));
}

}  // namespace torchrec_dyn
