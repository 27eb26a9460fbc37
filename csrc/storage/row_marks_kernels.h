// The kernels of marks (simt.h).
#pragma once

#include <cstdint>

#include "device_errors.h"
#include "simt.h"
#include "storage/row_marks.h"

namespace torchrec_dyn {

using MarkTables = WordTables<int32_t>;

struct CheckMarkedRows {
  const int64_t* rows;
  int64_t count;
  MarkTables tables;
  int64_t* first_bad;  // 0, or the position of the first row that is too high - count

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t row = rows[i];
    if (row < 0) return;
    const int64_t capacity = tables.of(i).words.capacity;
    if (capacity > 0 && row >= capacity) simt::atomic_min(first_bad, i - count);
  }
};

// As mark_rows: a mark is written only if it differs, so popular rows cost reads.
struct MarkRows {
  const int64_t* rows;
  int64_t count;
  MarkTables tables;
  const int64_t* first_bad;  // of CheckMarkedRows
  ErrorReport error;         // capacity, table

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (*first_bad != 0) {
      if (i == 0) report();
      return;
    }
    const int64_t row = rows[i];
    if (row < 0) return;
    const TableWords<int32_t>& table = tables.of(i);
    if (table.words.capacity == 0) return;
    const auto version = static_cast<int32_t>(table.now);
    int32_t* mark = table.words.word(row);
    if (simt::load(mark) != version) simt::store(mark, version);
  }

  TORCHREC_DYN_BOTH void report() const {
    const TableWords<int32_t>& table = tables.of(count + *first_bad);
    error.report(table.words.capacity, &table - tables.tables);
  }
};

}  // namespace torchrec_dyn
