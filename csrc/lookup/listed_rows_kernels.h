// The kernels of choose_listed, and those that list the rows of lowest_rows in order (simt.h).
#pragma once

#include <cstdint>

#include "life/scores_kernels.h"
#include "simt.h"
#include "storage/table_of.h"

namespace torchrec_dyn {

struct KeyDecayed {
  ScoreBlocks words;
  const int64_t* begins;  // [kMostHalvings]
  uint64_t* keyed;

  TORCHREC_DYN_BOTH void operator()(int64_t row) const { keyed[row] = with_decayed_key(*words.word(row), begins); }
};

struct ReadOrder {
  ScoreBlocks words;
  const int64_t* rows;
  simt::Pairs places;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    places.keys[i] = last_seen_of(*words.word(rows[i]));
    places.values[i] = i;
  }
};

struct ListedIds {
  int64_t* ids;
  int64_t* rows;
};

struct CopyListed {
  const int64_t* ids;
  const int64_t* rows;
  ListedIds copy;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    copy.ids[i] = ids[i];
    copy.rows[i] = rows[i];
  }
};

struct WriteInOrder {
  ListedIds given;
  simt::Pairs places;
  int64_t* ids;
  int64_t* rows;
  int64_t* last_seen;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    ids[i] = given.ids[places.values[i]];
    rows[i] = given.rows[places.values[i]];
    last_seen[i] = static_cast<int64_t>(places.keys[i]);
  }
};

// A list [3, size] of ids, rows and last_seen; entries from `begin` on are looked at.
struct ListedRows {
  const int64_t* list;
  int64_t size;
  int64_t begin;
  int64_t table;
};

struct ListedBatch {
  const ListedRows* lists;
  const int64_t* begins;  // [count + 1]: where the entries of each list begin
  int64_t count;
  ScoreTables scores;
  int64_t* places;  // 1 for an unchanged entry, else 0; then the sums of these

  TORCHREC_DYN_BOTH int64_t list_of(int64_t i) const {
    return table_of(i, count, [this](int64_t list) { return begins[list]; });
  }
  TORCHREC_DYN_BOTH int64_t entry(int64_t i, int64_t list) const { return lists[list].begin + i - begins[list]; }
};

// Launched with n + 1 threads.
struct FlagUnchanged {
  ListedBatch batch;
  int64_t n;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    batch.places[i] = 0;
    if (i == n) return;
    const int64_t l = batch.list_of(i);
    const ListedRows& list = batch.lists[l];
    const int64_t* row = list.list + list.size + batch.entry(i, l);
    batch.places[i] = is_unchanged(batch.scores.tables[list.table].words, row[0], row[list.size]);
  }
};

// Launched with count + 1 threads.
struct ReadChosenOffsets {
  ListedBatch batch;
  int64_t* offsets;

  TORCHREC_DYN_BOTH void operator()(int64_t list) const { offsets[list] = batch.places[batch.begins[list]]; }
};

// The first unchanged entry of each list, counted from the end of its entries.
struct FindFirstChosen {
  ListedBatch batch;
  int64_t* firsts;  // [count], 0 at first

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t list = batch.list_of(i);
    if (batch.places[i + 1] != batch.places[i]) simt::atomic_min(firsts + list, i - batch.begins[list + 1]);
  }
};

struct ListUnchanged {
  ListedBatch batch;
  const int64_t* into;   // [count]: where the chosen entries of each list are written
  const int64_t* taken;  // [count]
  int64_t* ids;
  int64_t* rows;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t l = batch.list_of(i);
    const int64_t place = batch.places[i] - batch.places[batch.begins[l]];
    if (batch.places[i + 1] == batch.places[i] || place >= taken[l]) return;
    const ListedRows& list = batch.lists[l];
    const int64_t* id = list.list + batch.entry(i, l);
    ids[into[l] + place] = id[0];
    rows[into[l] + place] = id[list.size];
  }
};

}  // namespace torchrec_dyn
