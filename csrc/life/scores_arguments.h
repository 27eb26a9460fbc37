// Checks of the arguments of the ops on scores, for every device.
#pragma once

#include <cstdint>

#include "checks.h"
#include "life/scores.h"

namespace torchrec_dyn {

inline void check_written_score(int64_t capacity, int64_t row, int64_t last_seen, int64_t count) {
  const char* op = "write_scores_";
  TORCHREC_DYN_CHECK(row >= 0 && row < capacity, op, ": expected rows in [0, ", capacity, "), got ", row, ".");
  TORCHREC_DYN_CHECK(is_last_seen(last_seen), op, ": expected last_seen in [-1, 2^32 - 1), got ", last_seen, ".");
  TORCHREC_DYN_CHECK(is_count(count), op, ": expected counts in [0, 2^32), got ", count, ".");
}

inline void raise_written_error(const int64_t* words) { check_written_score(words[0], words[1], words[2], words[3]); }

inline void check_read_rows(bool are_inside, int64_t capacity) {
  TORCHREC_DYN_CHECK(are_inside, "read_scores: expected rows in [-1, ", capacity, "), got one outside.");
}

inline void raise_read_error(const int64_t* words) { check_read_rows(false, words[0]); }

}  // namespace torchrec_dyn
