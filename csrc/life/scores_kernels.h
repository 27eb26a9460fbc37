// The kernels of scores (simt.h): touched by row.
#pragma once

#include <cstdint>

#include "device_errors.h"
#include "life/scores.h"
#include "simt.h"

namespace torchrec_dyn {

using ScoreTables = WordTables<uint64_t>;

// The functions of simt.h take signed words.
TORCHREC_DYN_BOTH inline int64_t* word_of(uint64_t* score) { return reinterpret_cast<int64_t*>(score); }

// The rows of a batch and the scores that they touch.
struct TouchedRows {
  const int64_t* rows;
  const int64_t* times;  // null: each row is touched once
  int64_t count;
  ScoreTables tables;
  // 0; or -1 if a row is outside; or, whatever the rows are, the position of the first invalid number of times
  // - 2 * count.
  int64_t* bad;
  ErrorReport error;  // 1, or the first invalid number of times
};

struct CheckTouchedRows {
  TouchedRows batch;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (batch.times != nullptr && !is_times(batch.times[i])) simt::atomic_min(batch.bad, i - 2 * batch.count);
    const int64_t row = batch.rows[i];
    if (row == -1) return;
    const ScoreBlocks& words = batch.tables.of(i).words;
    if (words.capacity > 0 && !words.holds(row)) simt::atomic_min(batch.bad, -1);
  }
};

// One thread for each occurrence of a row. A popular row has threads in every warp, and most of them would lose most
// rounds of an atomic_cas: their number would grow with the square of the occurrences. So only the first threads of a
// row do that, until one of them has written the step. The others add to the count, which always succeeds: before a
// thread adds, it sees that the count has room for all threads of the launch, so no sum of theirs reaches last_seen.
// With `times`, rows are distinct but for a few (ids that several ranks sent), and every thread exchanges.
struct TouchScores {
  TouchedRows batch;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (const int64_t bad = *batch.bad; bad != 0) {
      if (i == 0) batch.error.report(bad < -1 ? batch.times[2 * batch.count + bad] : 1);
      return;
    }
    const int64_t row = batch.rows[i];
    if (row < 0) return;
    const TableWords<uint64_t>& table = batch.tables.of(i);
    if (table.words.capacity == 0) return;
    int64_t* word = word_of(table.words.word(row));
    const auto step = static_cast<uint64_t>(table.now);
    for (int64_t seen = simt::load(word);;) {
      const auto score = static_cast<uint64_t>(seen);
      const bool has_room = count_of(score) + static_cast<uint64_t>(batch.count) <= kMostCount;
      if (batch.times == nullptr && last_seen_of(score) == step && has_room)
        return simt::warp_aggregated_increment(word);
      const uint64_t times = batch.times == nullptr ? 1 : static_cast<uint64_t>(batch.times[i]);
      const auto next = static_cast<int64_t>(touched(score, step, times));
      if (next == seen) return;
      const int64_t was = simt::atomic_cas(word, seen, next);
      if (was == seen) return;
      seen = was;
    }
  }
};

}  // namespace torchrec_dyn
