// The initial rows of many ids of one table on the CPU, on all threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "parallel.h"
#include "storage/blocks.h"
#include "storage/initial_rows_cpu.h"
#include "storage/row_access_cpu.h"

namespace torchrec_dyn {

// Writes the initial rows of ids to their rows of a table.
template <typename T>
void write_initial_rows(const InitialRows& initial, uint64_t key, int64_t first_column, const int64_t* ids,
                        const int64_t* rows, int64_t count, const RowBlocks<T>& table) {
  constexpr int64_t kGrain = 512;
  constexpr int64_t kBurst = 32;  // rows prefetched together, before their values are computed
  const bool is_constant = initial.kind == InitialKind::kConstant;  // as fresh optimizer state is
  const int64_t columns = table.columns;
  T constant;
  store_nearest(static_cast<float>(initial.low), &constant);
  for_each_task_apart((count + kGrain - 1) / kGrain, [&](int64_t piece) {
    const int64_t begin = piece * kGrain, end = std::min(count, begin + kGrain);
    for (int64_t i = begin; i < end; ++i) {
      if ((i - begin) % kBurst == 0)  // reused rows of evicted ids lie anywhere
        for (int64_t next = i + kBurst; next < end && next < i + 2 * kBurst; ++next) prefetch_row(table, rows[next]);
      T* out = table.row(rows[i]);
      if (is_constant) {
        std::fill(out, out + columns, constant);
        continue;
      }
      store_initial_row(initial, key, ids[i], first_column, columns, out);
    }
  });
}

}  // namespace torchrec_dyn
