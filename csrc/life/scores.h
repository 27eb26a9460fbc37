// Scores, the basis of eviction. One word for each row, last_seen << 32 | count:
//   last_seen  the training step at which the row's id last occurred, below 2^32 - 1, which marks a free row;
//   count      the number of its occurrences, at most 2^32 - 1.
// So words are ordered by last_seen, and one comparison finds the rows last seen before a step.
#pragma once

#include <cstdint>

#include "mix64.h"
#include "simd.h"
#include "storage/blocks.h"

namespace torchrec_dyn {

constexpr uint64_t kMostCount = 0xFFFFFFFFull;
constexpr uint64_t kFreeLastSeen = 0xFFFFFFFFull;
constexpr uint64_t kFreeScore = kFreeLastSeen << 32;

TORCHREC_DYN_BOTH constexpr uint64_t last_seen_of(uint64_t score) { return score >> 32; }
TORCHREC_DYN_BOTH constexpr uint64_t count_of(uint64_t score) { return score & kMostCount; }
TORCHREC_DYN_BOTH constexpr bool is_free(uint64_t score) { return last_seen_of(score) == kFreeLastSeen; }

// What the ops accept: numbers of touches; `last_seen`, -1 for a free row; counts.
TORCHREC_DYN_BOTH constexpr bool is_times(int64_t times) {
  return times >= 1 && times <= static_cast<int64_t>(kMostCount);
}
TORCHREC_DYN_BOTH constexpr bool is_last_seen(int64_t last_seen) {
  return last_seen >= -1 && last_seen < static_cast<int64_t>(kFreeLastSeen);
}
TORCHREC_DYN_BOTH constexpr bool is_count(int64_t count) {
  return count >= 0 && count <= static_cast<int64_t>(kMostCount);
}

// The order of eviction: by key, which is last_seen or count; rows of one key (ties) by the tie words of their ids,
// unsigned. The tie word is a bijection of the id.
constexpr int kOrderKeyBits = 32;
TORCHREC_DYN_BOTH constexpr uint64_t order_key(uint64_t score, bool by_count) {
  return by_count ? count_of(score) : last_seen_of(score);
}
TORCHREC_DYN_BOTH constexpr uint64_t tie_word(int64_t id) { return mix64(static_cast<uint64_t>(id)); }
TORCHREC_DYN_BOTH constexpr int64_t id_of_tie_word(uint64_t word) { return static_cast<int64_t>(unmix64(word)); }

// Counts that are halved at the start of every half-life (torchrec_dyn/life/decay.py): begins [kMostHalvings] are the
// first steps of the present half-life and of those before it, ascending. The order key is the present count in 256ths,
// rounded down, so that ids seen once differ by their age until nine half-lives have begun.
constexpr int64_t kMostHalvings = 40;

TORCHREC_DYN_BOTH constexpr uint64_t with_decayed_key(uint64_t score, const int64_t* begins) {
  const auto last_seen = static_cast<int64_t>(last_seen_of(score));
  int64_t begun = 0;
  for (int64_t step = 32; step > 0; step /= 2)  // the number of first steps up to last_seen
    if (begun + step <= kMostHalvings && begins[begun + step - 1] <= last_seen) begun += step;
  const uint64_t key = count_of(score) << 8 >> (kMostHalvings - begun);
  return (score & ~kMostCount) | (key < kMostCount ? key : kMostCount);
}

// The score of such numbers. A free row has no count.
TORCHREC_DYN_BOTH constexpr uint64_t score_of(int64_t last_seen, int64_t count) {
  return last_seen < 0 ? kFreeScore : static_cast<uint64_t>(last_seen) << 32 | static_cast<uint64_t>(count);
}

// The count that a new row begins with.
TORCHREC_DYN_BOTH inline int64_t first_count(const int64_t* counts, int64_t i) {
  if (counts == nullptr || counts[i] < 0) return 0;
  const auto most = static_cast<int64_t>(kMostCount);
  return counts[i] < most ? counts[i] : most;
}

// The end of the words that qualify for eviction before the step `before`: a row last seen at `before` with count 0 was
// assigned for this step, and qualifies. Free rows never qualify.
TORCHREC_DYN_BOTH constexpr uint64_t end_of_scores(int64_t before) {
  if (before < 0) return 0;
  return before < static_cast<int64_t>(kFreeLastSeen) ? (static_cast<uint64_t>(before) << 32) + 1 : kFreeScore;
}

// The score after `times` more occurrences at `step`; times is at most kMostCount.
TORCHREC_DYN_BOTH constexpr uint64_t touched(uint64_t score, uint64_t step, uint64_t times = 1) {
  const uint64_t count = count_of(score), room = kMostCount - count;
  return step << 32 | (count + (times < room ? times : room));
}

using ScoreBlocks = WordBlocks<uint64_t>;

// Batches of tables: row -1 is skipped, as is any row of a table without scores.
TORCHREC_DYN_BOTH inline bool is_scored(const ScoreBlocks& words, int64_t row) {
  return words.capacity > 0 && row != -1;
}

// True if a listed row was neither seen nor removed since it was listed.
TORCHREC_DYN_BOTH inline bool is_unchanged(const ScoreBlocks& words, int64_t row, int64_t last_seen) {
  if (!words.holds(row)) return false;
  const uint64_t score = *words.word(row);
  return !is_free(score) && static_cast<int64_t>(last_seen_of(score)) == last_seen;
}

// Scores of a cache line: parts own whole lines.
constexpr int64_t kLineScores = 8;
constexpr int64_t kScoreBurst = 64;

// Prefetches the scores of the burst of rows after the one that begins at `i`; rows may lie outside the table.
TORCHREC_DYN_INLINE void prefetch_scores(const ScoreBlocks& scores, const int64_t* rows, int64_t i, int64_t end) {
  for (int64_t next = i + kScoreBurst; next < end && next < i + 2 * kScoreBurst; ++next)
    if (scores.holds(rows[next])) __builtin_prefetch(scores.word(rows[next]), 1, 2);
}

// Prefetched words, and the number of touches of each word.
struct ScoreTouches {
  uint64_t* words[kScoreBurst];
  uint64_t times[kScoreBurst];
  int64_t count = 0;

  template <bool kTimes>
  void write(uint64_t step) const {
    for (int64_t i = 0; i < count; ++i) *words[i] = touched(*words[i], step, kTimes ? times[i] : 1);
  }
};

// Prefetches and lists the words that part `part` of `parts` (a power of two) owns among `count` rows, at most
// kScoreBurst. Each word is to be touched `times[i]` times, or once without times. Requires a capacity above 0 and rows
// in [-1, capacity).
template <bool kTimes>
TORCHREC_DYN_INLINE void ask_for_scores(const ScoreBlocks& scores, const int64_t* rows, const int64_t* times,
                                        int64_t count, int64_t part, int64_t parts, ScoreTouches& touches) {
  int64_t owned = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool holds = rows[i] >= 0;
    const int64_t row = holds ? rows[i] : 0;
    touches.words[owned] = scores.word(row);
    if constexpr (kTimes) touches.times[owned] = static_cast<uint64_t>(times[i]);
    owned += holds & (((row / kLineScores) & (parts - 1)) == part);
  }
  for (int64_t i = 0; i < owned; ++i) __builtin_prefetch(touches.words[i], 1, 2);
  touches.count = owned;
}

// Touches the rows of one part, in their order: `times[i]` times for each occurrence of a row, or once without times.
template <bool kTimes>
inline void touch_part(const ScoreBlocks& scores, const int64_t* rows, const int64_t* times, int64_t count,
                       uint64_t step, int64_t part, int64_t parts) {
  ScoreTouches touches[2];
  int64_t burst = 0;
  for (int64_t begin = 0; begin < count; begin += kScoreBurst, burst ^= 1) {
    const int64_t left = count - begin;
    ask_for_scores<kTimes>(scores, rows + begin, kTimes ? times + begin : nullptr,
                           left < kScoreBurst ? left : kScoreBurst, part, parts, touches[burst]);
    touches[burst ^ 1].write<kTimes>(step);
  }
  touches[burst ^ 1].write<kTimes>(step);
}

}  // namespace torchrec_dyn
