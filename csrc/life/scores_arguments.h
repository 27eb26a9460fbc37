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

inline void check_lowest(int64_t capacity, int64_t rows, int64_t most) {
  const char* op = "lowest_scores";
  TORCHREC_DYN_CHECK(rows >= 0 && rows <= capacity, op, ": expected rows in [0, ", capacity, "], got ", rows, ".");
  TORCHREC_DYN_CHECK(most >= 0, op, ": expected most >= 0, got ", most, ".");
}

inline void check_ids_to_order(const Tensor& ids, const Tensor& last_seen, const Device& device) {
  const char* op = "oldest_first";
  check_tensor(op, "ids", ids, ScalarType::Long, device);
  check_tensor(op, "last_seen", last_seen, ScalarType::Long, ids.device());
  check_size(op, "the number of last_seen", ids.numel(), last_seen.numel());
  TORCHREC_DYN_CHECK(ids.numel() < (int64_t{1} << 32), op, ": expected fewer than 2^32 ids, got ", ids.numel(), ".");
}

inline void check_order_key(int64_t last_seen) {
  TORCHREC_DYN_CHECK(is_order_key(last_seen), "oldest_first: expected last_seen in [0, 2^32), got ", last_seen, ".");
}

inline void raise_order_error(const int64_t* words) { check_order_key(words[0]); }

}  // namespace torchrec_dyn
