// The kernels of rows that come and go (simt.h): their numbers and their scores. Ids: storage/id_map_kernels.h.
#pragma once

#include <cstdint>

#include "both_devices.h"
#include "device_errors.h"
#include "life/scores_kernels.h"
#include "storage/table_of.h"

namespace torchrec_dyn {

struct NumberNewRows {
  const int64_t* offsets;         // [T + 1] of the new ids
  const int64_t* first_rows;      // [T]
  const int64_t* reused_offsets;  // [T + 1]
  const int64_t* reused;
  const int64_t* capacities;  // [T]
  int64_t tables;
  int64_t* rows;  // -1 in place of a row outside

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t table = table_of(i, tables, [this](int64_t t) { return offsets[t]; });
    const int64_t place = i - offsets[table], again = reused_offsets[table + 1] - reused_offsets[table];
    const int64_t row = place < again ? reused[reused_offsets[table] + place] : first_rows[table] + place - again;
    rows[i] = row < capacities[table] ? row : -1;
  }
};

// The rows of a call and the scores of their tables; a table of capacity 0 keeps none.
struct ScoredBatch {
  const int64_t* rows;
  ScoreTables tables;
  ErrorReport error;  // row, capacity

  // The word of row `i`; null if it has none. Reports a row outside.
  TORCHREC_DYN_BOTH int64_t* word(int64_t i) const {
    const TableWords<uint64_t>& table = tables.of(i);
    if (table.words.capacity == 0) return nullptr;
    if (table.words.holds(rows[i])) return word_of(table.words.word(rows[i]));
    error.report(rows[i], table.words.capacity);
    return nullptr;
  }
};

// The step of a table is its `now`.
struct WriteFirstScores {
  ScoredBatch batch;
  const int64_t* counts;     // or null
  const int64_t* first_bad;  // of CheckRows

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (*first_bad != 0) return;
    int64_t* word = batch.word(i);
    if (word != nullptr) *word = static_cast<int64_t>(score_of(batch.tables.of(i).now, first_count(counts, i)));
  }
};

struct CheckRemovedRows {
  ScoredBatch batch;
  int64_t* bad;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (batch.word(i) == nullptr && batch.tables.of(i).words.capacity > 0) simt::atomic_min(bad, -1);
  }
};

struct ForgetScores {
  ScoredBatch batch;
  const int64_t* bad;  // of CheckRemovedRows

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (*bad != 0) return;
    if (int64_t* word = batch.word(i); word != nullptr) *word = static_cast<int64_t>(kFreeScore);
  }
};

}  // namespace torchrec_dyn
