// The kernels of collect_new (simt.h): the first position of each absent id, without sorting.
//
// Every table has a region of words for positions + 1, twice as many words as ids, all 0 at first. An absent id looks
// for its word from its home in the region on: it claims an empty word by atomic_cas, or finds a word whose
// position has the same id, and lowers the word to its own position if that is earlier. Every position that such a word
// ever has is of one id, so a thread may compare ids at any time. After the launch the words have the first positions.
#pragma once

#include <cstdint>

#include "simt.h"
#include "slot_hash.h"
#include "storage/id_map.h"
#include "storage/table_of.h"

namespace torchrec_dyn {

// The ids of a batch.
struct FoundIds {
  const int64_t* ids;
  const int64_t* rows;
  const int64_t* offsets;   // [tables + 1]: where the ids of each table begin
  const int64_t* frozen;    // null, or [tables]: 1 for a table whose ids are not listed
  const int64_t* is_wrong;  // null, or a word: if it is not 0 the offsets are wrong, and no id is listed
  int64_t tables;
  int64_t count;  // of ids
};

// What is found of them, in three launches.
struct NewIds : FoundIds {
  SlotHash hash;
  int64_t* words;   // [2 * count], 0 at first
  int64_t* index;   // [count]: of an absent id its word, then its first position, then its place in new_ids; else -1
  int64_t* times;   // [count], 0 at first: of a first position, the occurrences of its id
  int64_t* places;  // [count + 1]: 1 for a first position, else 0; then the sums of these

  TORCHREC_DYN_BOTH bool has_offsets() const { return is_wrong == nullptr || *is_wrong == 0; }
  TORCHREC_DYN_BOTH bool is_listed(int64_t i) const { return rows[i] == kNoRow && has_offsets(); }

  // The word of id `i`; kNoRow if it is not listed.
  TORCHREC_DYN_BOTH int64_t claim_word(int64_t i) const {
    const int64_t table = table_of(i, tables, [this](int64_t t) { return offsets[t]; });
    if (frozen != nullptr && frozen[table] != 0) return kNoRow;
    const int64_t begin = 2 * offsets[table];
    const int64_t capacity = 2 * offsets[table + 1] - begin;
    int64_t word = begin + home_slot(hash(ids[i]), capacity);
    for (int64_t probe = 0; probe < capacity; ++probe, word = word + 1 == begin + capacity ? begin : word + 1) {
      int64_t position = simt::load(words + word);
      if (position == 0) position = simt::atomic_cas(words + word, 0, i + 1);
      if (position == 0) return word;
      if (ids[position - 1] != ids[i]) continue;
      if (position > i + 1) simt::atomic_min(words + word, i + 1);
      return word;
    }
    return begin;  // never: at most half of the words are in use
  }
};

struct ClaimWords {
  NewIds found;
  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    found.index[i] = found.is_listed(i) ? found.claim_word(i) : kNoRow;
  }
};

// Launched with count + 1 threads: the sums then end with the number of new ids.
struct CountFirsts {
  NewIds found;
  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    found.places[i] = 0;
    if (i == found.count || found.index[i] == kNoRow) return;
    const int64_t first = found.words[found.index[i]] - 1;
    found.index[i] = first;
    found.places[i] = first == i;
    simt::warp_aggregated_increment(found.times + first);
  }
};

// Launched with tables + 1 threads.
struct ReadOffsets {
  NewIds found;
  int64_t* new_offsets;
  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    new_offsets[i] = found.has_offsets() ? found.places[found.offsets[i]] : 0;
  }
};

struct ListNew {
  NewIds found;
  int64_t* new_ids;
  int64_t* new_counts;
  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t first = found.index[i];
    if (first == kNoRow) return;
    const int64_t place = found.places[first];
    found.index[i] = place;
    if (first != i) return;
    new_ids[place] = found.ids[i];
    new_counts[place] = found.times[i];
  }
};

}  // namespace torchrec_dyn
