// The kernels of admit (simt.h).
#pragma once

#include <cstdint>

#include "life/admission.h"
#include "life/scores_kernels.h"
#include "simt.h"
#include "storage/id_map_kernels.h"
#include "storage/table_of.h"

namespace torchrec_dyn {

// The new ids of a call in two launches: DecideAdmission writes what becomes of each, ListAdmitted lists them.
struct AdmittedBatch {
  NewIdsToAdmit given;
  TableMaps maps;          // of the counters; no maps without counters
  ScoreTables scores;      // of the counters
  const int64_t* offsets;  // [T + 1]
  int64_t tables;
  int64_t ids;
  int64_t* outcomes;  // [ids], of Admitted
  int64_t* counts;    // [ids]
  int64_t* rows;      // [ids]: of the counters, kNoRow for none
  int64_t* places;    // [kAdmittedLists * ids + 1]: 1 for an id of a list; then the sums of these

  TORCHREC_DYN_BOTH int64_t table_of(int64_t i) const {
    return torchrec_dyn::table_of(i, tables, [this](int64_t t) { return offsets[t]; });
  }
};

struct DecideAdmission {
  AdmittedBatch batch;
  int64_t* numbers;   // [T, 2], 0 at first: occurrences of all ids, and of those that are not admitted
  ErrorReport error;  // row, capacity of the counters

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t t = batch.table_of(i), id = batch.given.ids[i];
    int64_t row = kNoRow, in_counter = 0;
    if (batch.maps.tables > 0) {
      const IdMapView& map = batch.maps.maps[t].map;
      row = find_row(map, id, map.hash(id));
      const ScoreBlocks& words = batch.scores.tables[t].words;
      if (row != kNoRow && !words.holds(row)) {
        error.report(row, words.capacity);
        row = kNoRow;
      }
      if (row != kNoRow) in_counter = static_cast<int64_t>(count_of(*words.word(row)));
    }
    const int64_t count = batch.given.count(i, in_counter);
    const Admitted outcome = batch.given.decide(i, t, count, row != kNoRow);
    batch.outcomes[i] = static_cast<int64_t>(outcome);
    batch.counts[i] = count;
    batch.rows[i] = row;
    for (int64_t list = 0; list < kAdmittedLists; ++list)
      batch.places[list * batch.ids + i] = is_in_list(outcome, list);
    if (i == 0) batch.places[kAdmittedLists * batch.ids] = 0;
    const int64_t occurred = batch.given.occurrences[i];
    simt::atomic_add(numbers + 2 * t, occurred);
    if (!is_admitted(outcome)) simt::atomic_add(numbers + 2 * t + 1, occurred);
  }
};

// Launched with kAdmittedLists * (T + 1) threads: where each list of each table begins among all lists.
struct ReadAdmittedOffsets {
  AdmittedBatch batch;
  int64_t* begins;  // [kAdmittedLists, T + 1]

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t list = i / (batch.tables + 1), t = i % (batch.tables + 1);
    begins[i] = batch.places[list * batch.ids + batch.offsets[t]];
  }
};

struct ListAdmitted {
  AdmittedBatch batch;
  int64_t* places;  // of the admitted ids
  int64_t* first;
  int64_t* second;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const auto outcome = static_cast<Admitted>(batch.outcomes[i]);
    const int64_t id = batch.given.ids[i], row = batch.rows[i], count = batch.counts[i];
    if (is_admitted(outcome)) {
      places[batch.places[i]] = i;
      write(0, i, id, count);
    }
    if (outcome == Admitted::kCounted) write(1, i, id, row);
    if (outcome == Admitted::kSeen) write(2, i, row, batch.given.occurred(i));
    if (outcome == Admitted::kBegun) write(3, i, id, count);
  }

  TORCHREC_DYN_BOTH void write(int64_t list, int64_t i, int64_t of_first, int64_t of_second) const {
    const int64_t place = batch.places[list * batch.ids + i];
    first[place] = of_first;
    second[place] = of_second;
  }
};

}  // namespace torchrec_dyn
