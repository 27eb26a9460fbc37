// The kernels of pool_prepared_ for the bags of new ids and of initial rows (simt.h): a batch was pooled before its new
// ids had rows, with zeros for absent ones.
#pragma once

#include <cstdint>

#include "lookup/pooling_kernels.h"
#include "storage/initial_rows.h"

namespace torchrec_dyn {

// The threads of PoolBags; one pools its unit if an id of its bag is new. The threads of a bag read the same words,
// in step: few ids are new in most steps, and then this is the cost of the launch.
template <typename T, typename Out>
struct PoolNewBags {
  PoolBags<T, Out, false> all;
  const int64_t* new_index;  // -1 for an id that is not new

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const DeviceBags<T>& bags = all.bags;
    const DeviceSegment<T>& segment = bags.segment_of_thread(i);
    const Division::Parts parts = segment.split(i);
    const typename DeviceBags<T>::Range ids = bags.range(segment.first_bag + parts.quotient);
    int64_t id = ids.begin;
    while (id < ids.end && new_index[id] < 0) ++id;
    if (id < ids.end) all.pool_unit(segment, parts);
  }
};

// Ids without a row that read as initial rows.
struct ShownRows {
  const int64_t* ids;           // of all rows of the call; null: absent rows are zeros
  const InitialTable* initial;  // of each segment

  // One number as rows store it.
  template <typename T>
  TORCHREC_DYN_BOTH float number(const InitialTable& own, int64_t i, int64_t column) const {
    T stored;
    store_nearest(initial_number(own, ids[i], column), &stored);
    return to_float(stored);
  }
};

// The threads of PoolBags; one pools its unit if an id of its bag is new, or reads as an initial row. Column by column
// and id by id: a column takes a block of Philox, where four could share it, but numbers of a unit would need more
// registers than PoolBags has.
template <typename T, typename Out>
struct PoolShownBags {
  PoolBags<T, Out, false> all;
  const int64_t* new_index;  // -1 for an id that is not new; or null
  ShownRows shown;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const DeviceBags<T>& bags = all.bags;
    const DeviceSegment<T>& segment = bags.segment_of_thread(i);
    const Division::Parts parts = segment.split(i);
    const int64_t bag = segment.first_bag + parts.quotient;
    const typename DeviceBags<T>::Range ids = bags.range(bag);
    const InitialTable& own = shown.initial[&segment - bags.segments];
    bool is_pooled = false, are_inside = true;
    for (int64_t id = ids.begin; id < ids.end; ++id) {
      const int64_t row = bags.rows[id];
      is_pooled |= (own.is_shown && row == kNoRow) || (new_index != nullptr && new_index[id] >= 0);
      are_inside &= segment.table.has(row) || row == kNoRow;
    }
    if (!are_inside) return bags.note_row_outside(bag);
    if (!is_pooled) return;
    Out* const place = all.out + segment.out_offset + parts.quotient * segment.out_stride;
    const int64_t first = parts.remainder * segment.unit_columns;
    for (int64_t column = first; column < first + segment.unit_columns; ++column)
      store_nearest(sum(segment, own, ids, column), &place[column]);
  }

  TORCHREC_DYN_BOTH float sum(const DeviceSegment<T>& segment, const InitialTable& own,
                              const typename DeviceBags<T>::Range& ids, int64_t column) const {
    float sum = 0.0f;
    for (int64_t id = ids.begin; id < ids.end; ++id) {
      const int64_t row = all.bags.rows[id];
      if (row == kNoRow && !own.is_shown) continue;
      const float number = row == kNoRow ? shown.number<T>(own, id, column) : to_float(segment.table.row(row)[column]);
      sum += (all.bag_weights == nullptr ? 1.0f : all.bag_weights[id]) * number;
    }
    return all.bags.mean ? sum / static_cast<float>(ids.end - ids.begin) : sum;
  }
};

// The threads of DotRows, after it: one for each id that reads as an initial row.
template <typename T>
struct DotShownRows {
  DeviceBags<T> bags;
  const float* grad;
  float* out;
  ShownRows shown;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    if (bags.rows[i] != kNoRow) return;
    const int64_t bag =
        bags.offsets == nullptr ? i : table_of(i, bags.count, [this](int64_t b) { return bags.offsets[b]; });
    const typename DeviceBags<T>::Range ids = bags.range(bag);
    if (i < ids.begin || i >= ids.end) return;
    const DeviceSegment<T>& segment = bags.segment_of_bag(bag);
    const InitialTable& own = shown.initial[&segment - bags.segments];
    if (!own.is_shown) return;
    const float* bag_grad = grad + segment.out_offset + (bag - segment.first_bag) * segment.out_stride;
    double sum = 0.0;
    for (int64_t column = 0; column < segment.table.columns; ++column)
      sum += static_cast<double>(bag_grad[column]) * shown.number<T>(own, i, column);
    out[i] = static_cast<float>(bags.mean ? sum / static_cast<double>(ids.end - ids.begin) : sum);
  }
};

}  // namespace torchrec_dyn
