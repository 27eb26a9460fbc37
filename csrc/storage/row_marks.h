// Marks of rows: one 32-bit word a row, the version at which the row was last named. One pass over the words
// lists the rows changed since a version.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>

#include "simd.h"
#include "storage/blocks.h"

namespace torchrec_dyn {

using MarkBlocks = WordBlocks<int32_t>;

// Whether every row lies below `capacity`.
TORCHREC_DYN_INLINE bool all_below(const int64_t* rows, int64_t count, int64_t capacity) {
  int64_t highest = -1;
  for (int64_t i = 0; i < count; ++i) highest = rows[i] > highest ? rows[i] : highest;
  return highest < capacity;
}

// Writes `version` for the rows, all below the capacity; negative ones are skipped. Several threads may name one row,
// so words are written as atomics, and only where they differ: popular rows then stay in the caches of all cores.
// `marks` by value: of a reference the compiler reads the fields again for every row.
inline void mark_rows(MarkBlocks marks, const int64_t* rows, int64_t count, int32_t version) {
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] < 0) continue;
    const std::atomic_ref<int32_t> mark(*marks.word(rows[i]));
    if (mark.load(std::memory_order_relaxed) != version) mark.store(version, std::memory_order_relaxed);
  }
}

TORCHREC_DYN_INLINE int64_t count_marked(const int32_t* words, int64_t count, int32_t since) {
  int64_t marked = 0;
  for (int64_t i = 0; i < count; ++i) marked += words[i] >= since;
  return marked;
}

// Words that are looked at together.
constexpr int64_t kMarkRun = 512;

// Lists the rows of up to kMarkRun words, the first of them `row`, whose mark is `since` or later. Returns where the
// list ends; nothing behind it is written.
TORCHREC_DYN_INLINE int64_t* list_marked(const int32_t* words, int64_t row, int64_t count, int32_t since,
                                         int64_t* list) {
  std::array<int64_t, kMarkRun + 1> found;
  size_t kept = 0;
  for (int64_t i = 0; i < count; ++i) {
    found[kept] = row + i;
    kept += words[i] >= since;
  }
  return std::copy(found.data(), found.data() + kept, list);
}

}  // namespace torchrec_dyn
