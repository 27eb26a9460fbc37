// The kernels of scores of prepared tables (simt.h): read and written by row. life/scores_kernels.h touches them.
#pragma once

#include <cstdint>

#include "device_errors.h"
#include "life/scores_kernels.h"

namespace torchrec_dyn {

struct ReadTableScores {
  const int64_t* rows;
  ScoreTables tables;
  int64_t* last_seen;
  int64_t* counts;
  ErrorReport error;  // row, capacity

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const ScoreBlocks& words = tables.of(i).words;
    uint64_t score = kFreeScore;
    if (is_scored(words, rows[i])) {
      if (words.holds(rows[i]))
        score = *words.word(rows[i]);
      else
        error.report(rows[i], words.capacity);
    }
    last_seen[i] = is_free(score) ? -1 : static_cast<int64_t>(last_seen_of(score));
    counts[i] = is_free(score) ? 0 : static_cast<int64_t>(count_of(score));
  }
};

// Equal rows have equal scores.
struct WrittenRows {
  const int64_t* rows;
  const int64_t* last_seen;
  const int64_t* counts;
  ScoreTables tables;
  int64_t* bad;       // 0, or -1 if a row or a score is wrong
  ErrorReport error;  // row, capacity
};

struct CheckWrittenRows {
  WrittenRows given;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const ScoreBlocks& words = given.tables.of(i).words;
    if (!is_scored(words, given.rows[i])) return;
    if (words.holds(given.rows[i]) && is_last_seen(given.last_seen[i]) && is_count(given.counts[i])) return;
    simt::atomic_min(given.bad, -1);
    given.error.report(given.rows[i], words.capacity);
  }
};

struct WriteTableScores {
  WrittenRows given;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const ScoreBlocks& words = given.tables.of(i).words;
    if (*given.bad != 0 || !is_scored(words, given.rows[i])) return;
    const auto score = static_cast<int64_t>(score_of(given.last_seen[i], given.counts[i]));
    simt::store(word_of(words.word(given.rows[i])), score);
  }
};

}  // namespace torchrec_dyn
