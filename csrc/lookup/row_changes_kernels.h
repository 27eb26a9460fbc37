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
  int64_t tables;
  int64_t* rows;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t table = table_of(i, tables, [this](int64_t t) { return offsets[t]; });
    const int64_t place = i - offsets[table], again = reused_offsets[table + 1] - reused_offsets[table];
    rows[i] = place < again ? reused[reused_offsets[table] + place] : first_rows[table] + place - again;
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
  const int64_t* counts;  // or null

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    int64_t* word = batch.word(i);
    if (word != nullptr)
      *word = static_cast<int64_t>(score_of(batch.tables.of(i).now, first_count(counts, i)));
  }
};

struct ForgetScores {
  ScoredBatch batch;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (int64_t* word = batch.word(i); word != nullptr) *word = static_cast<int64_t>(kFreeScore);
  }
};

}  // namespace torchrec_dyn
