// Gather and pool on the CPU, and the gradient of the bag weights.
//
//   out[bag] = sum over the ids i of the bag of bag_weight[i] * weights[rows[i]],   divided by the bag's
//   length for the mean. An absent row (-1) counts as zeros, or as the initial row of its id; an empty bag is zeros.
// The terms of a bag are added in their order, in float32, so the result does not depend on threads.
#include <algorithm>
#include <cstring>
#include <memory>

#include "floats16_cpu.h"
#include "lookup/bags.h"
#include "lookup/pooling_cpu.h"
#include "output_memory.h"
#include "parallel.h"
#include "simd.h"
#include "storage/blocks_arguments.h"
#include "storage/initial_rows_cpu.h"
#include "storage/row_access_cpu.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace torchrec_dyn {
namespace {

// Stores past the caches, for memory that will not be read soon: the line is not fetched first, and no other line is
// evicted from the caches for it. Requires `to` on a 16-byte boundary.
template <int64_t kBytes>
TORCHREC_DYN_INLINE void store_past_caches(const Floats16<kBytes>& lanes, float* to) {
#if defined(__SSE__)
  for (const auto& floats : lanes.registers) {
    __m128 quarters[kBytes / sizeof(__m128)];
    std::memcpy(quarters, &floats, sizeof floats);
    for (const __m128 quarter : quarters) {
      _mm_stream_ps(to, quarter);
      to += 4;
    }
  }
#else
  lanes.store(to);
#endif
}

// Stores past the caches are not ordered with other stores: a thread that made such stores must call this before it
// reports that it is done.
inline void finish_stores_past_caches() {
#if defined(__SSE__)
  _mm_sfence();
#endif
}

// Rows are prefetched kAhead ids ahead (enough to cover a miss, few enough to stay in L2), kBurst at a time: a row is
// usually on a new page too, and in a tight loop more page walks overlap.
constexpr int64_t kAhead = 32;
constexpr int64_t kBurst = 32;

template <typename T>
struct PoolJob {
  Bags bags;
  const std::vector<RowBlocks<T>>& tables;
  const int64_t* rows;
  const float* bag_weights;  // or null
  bool mean;
  bool streams;                 // the output is written past the caches
  const int64_t* initial_ids;   // null: all absent rows are zeros
  const InitialTable* initial;  // of each table, for initial_ids

  // The initial row of an id without a row, in `memory`; null if it counts as zeros.
  const T* initial_row(int64_t i, int64_t table, T* memory) const {
    if (initial_ids == nullptr || !initial[table].is_shown) return nullptr;
    const InitialTable& own = initial[table];
    const int64_t columns = tables[static_cast<size_t>(table)].columns;
    store_initial_row(own.rows, own.key, initial_ids[i], own.first_column, columns, memory);
    return memory;
  }
};

// Pools kParts * 16 columns of a bag from `column` on. kBytes: of a register.
template <int64_t kBytes, int64_t kParts, bool kWeighted, typename T>
TORCHREC_DYN_INLINE void pool_lanes(const PoolJob<T>& job, const RowBlocks<T>& table, int64_t begin, int64_t end,
                                    int64_t column, float* out) {
  Floats16<kBytes> sums[kParts];
  Floats16<kBytes> values;
  for (int64_t i = begin; i < end; ++i) {
    if (job.rows[i] < 0) continue;
    const T* row = table.row(job.rows[i]) + column;
    for (int64_t p = 0; p < kParts; ++p) {
      load_row(row + p * kLanes, values);
      if (kWeighted) values *= job.bag_weights[i];
      sums[p] += values;
    }
  }
  // Unrolled, since sums that a loop indexes would stand in memory.
#pragma GCC unroll 8
  for (int64_t p = 0; p < kParts; ++p) {
    if (job.mean && end > begin) sums[p] /= static_cast<float>(end - begin);
    job.streams ? store_past_caches(sums[p], out + p * kLanes) : sums[p].store(out + p * kLanes);
  }
}

// Pools the columns after the last group of sixteen.
template <typename T>
TORCHREC_DYN_INLINE void pool_rest(const PoolJob<T>& job, const RowBlocks<T>& table, int64_t begin, int64_t end,
                                   int64_t column, float* out) {
  const int64_t width = table.columns - column;
  std::fill(out, out + width, 0.0f);
  for (int64_t i = begin; i < end; ++i) {
    if (job.rows[i] < 0) continue;
    const T* row = table.row(job.rows[i]) + column;
    const float scale = job.bag_weights ? job.bag_weights[i] : 1.0f;
    for (int64_t c = 0; c < width; ++c) out[c] += scale * to_float(row[c]);
  }
  if (job.mean && end > begin)
    for (int64_t c = 0; c < width; ++c) out[c] /= static_cast<float>(end - begin);
}

template <int64_t kBytes, bool kWeighted, typename T>
TORCHREC_DYN_INLINE void pool_bag(const PoolJob<T>& job, const RowBlocks<T>& table, int64_t begin, int64_t end,
                                  float* out) {
  int64_t c = 0;
  for (; table.columns - c >= 8 * kLanes; c += 8 * kLanes)
    pool_lanes<kBytes, 8, kWeighted>(job, table, begin, end, c, out + c);
  for (; table.columns - c >= 4 * kLanes; c += 4 * kLanes)
    pool_lanes<kBytes, 4, kWeighted>(job, table, begin, end, c, out + c);
  for (; table.columns - c >= kLanes; c += kLanes) pool_lanes<kBytes, 1, kWeighted>(job, table, begin, end, c, out + c);
  if (table.columns > c) pool_rest(job, table, begin, end, c, out + c);
}

// Copies the rows of bags of one id each, in whole groups of sixteen columns: kColumns, or any number if that is 0.
template <int64_t kBytes, int64_t kColumns, typename T>
TORCHREC_DYN_INLINE void copy_rows(RowBlocks<T> table, const int64_t* rows, int64_t count, bool streams, float* out,
                                   int64_t stride) {
  if (kColumns > 0) table.columns = kColumns;
  int64_t next = 0;
  for (int64_t i = 0; i < count; ++i, out += stride) {
    if (next < i + kAhead)
      for (const int64_t until = std::min(count, i + kAhead + kBurst); next < until; ++next)
        if (rows[next] >= 0) prefetch_row(table, rows[next]);
    const T* row = rows[i] < 0 ? nullptr : table.row(rows[i]);
    for (int64_t c = 0; c < table.columns; c += kLanes) {
      Floats16<kBytes> sum;
      Floats16<kBytes> values;
      if (row != nullptr) {
        load_row(row + c, values);
        sum += values;  // not a copy: -0 becomes 0, as in any bag
      }
      streams ? store_past_caches(sum, out + c) : sum.store(out + c);
    }
  }
}

// sums: as many floats as the widest row has; not used if Out is float.
template <int64_t kBytes, typename T, typename Out>
TORCHREC_DYN_INLINE void pool_segment(const PoolJob<T>& all, const Segment& segment, int64_t first, int64_t last,
                                      float* sums, Out* out) {
  const PoolJob<T> job = all;  // a copy: the compiler sees that no store changes it
  const RowBlocks<T> table = job.tables[static_cast<size_t>(segment.table)];
  Out* place = out + segment.out_offset + (first - segment.first_bag) * segment.out_stride;
  if constexpr (sizeof(Out) == sizeof(float)) {
    if (job.bags.offsets == nullptr && job.bag_weights == nullptr && table.columns % kLanes == 0) {
      const int64_t* rows = job.rows + first;
      return table.columns == kLanes
                 ? copy_rows<kBytes, kLanes>(table, rows, last - first, job.streams, place, segment.out_stride)
                 : copy_rows<kBytes, 0>(table, rows, last - first, job.streams, place, segment.out_stride);
    }
  }
  const int64_t stop = job.bags.end(last - 1);
  int64_t ahead = job.bags.begin(first);
  for (int64_t bag = first; bag < last; ++bag, place += segment.out_stride) {
    const int64_t end = job.bags.end(bag);
    if (ahead < end + kAhead)
      for (const int64_t until = std::min(stop, end + kAhead + kBurst); ahead < until; ++ahead)
        if (job.rows[ahead] >= 0) prefetch_row(table, job.rows[ahead]);
    float* pooled = sums;
    if constexpr (sizeof(Out) == sizeof(float)) pooled = place;
    if (job.bag_weights)
      pool_bag<kBytes, true>(job, table, job.bags.begin(bag), end, pooled);
    else
      pool_bag<kBytes, false>(job, table, job.bags.begin(bag), end, pooled);
    if constexpr (sizeof(Out) != sizeof(float)) {
      for (int64_t c = 0; c < table.columns; ++c) store_nearest(sums[c], &place[c]);
    }
  }
}

// Pools the bags again that have initial rows, with the sums of pool_bag. `memory` and `sums`: of the widest row.
template <typename T, typename Out>
void pool_initial_rows(const PoolJob<T>& job, const Segment& segment, int64_t first, int64_t last, T* memory,
                       float* sums, Out* out) {
  if (!job.initial[segment.table].is_shown) return;
  const RowBlocks<T>& table = job.tables[static_cast<size_t>(segment.table)];
  Out* place = out + segment.out_offset + (first - segment.first_bag) * segment.out_stride;
  for (int64_t bag = first; bag < last; ++bag, place += segment.out_stride) {
    const int64_t begin = job.bags.begin(bag), end = job.bags.end(bag);
    if (std::none_of(job.rows + begin, job.rows + end, [](int64_t row) { return row < 0; })) continue;
    std::fill(sums, sums + table.columns, 0.0f);
    for (int64_t i = begin; i < end; ++i) {
      const T* row = job.rows[i] < 0 ? job.initial_row(i, segment.table, memory) : table.row(job.rows[i]);
      const float scale = job.bag_weights ? job.bag_weights[i] : 1.0f;
      for (int64_t c = 0; c < table.columns; ++c) sums[c] += scale * to_float(row[c]);
    }
    for (int64_t c = 0; c < table.columns; ++c) {
      if (job.mean) sums[c] /= static_cast<float>(end - begin);
      store_nearest(sums[c], &place[c]);
    }
  }
}

// The columns of the widest row.
int64_t most_columns(const PreparedTables& tables) {
  int64_t most = 0;
  for (const TableLayout& table : tables.layout) most = std::max(most, table.columns);
  return most;
}

template <typename Number>
std::unique_ptr<Number[]> numbers_of(int64_t count) {
  return std::make_unique_for_overwrite<Number[]>(static_cast<size_t>(count));
}

// True if the output is written past the caches: it is too large for them, and every bag's output begins on a 16-byte
// boundary, which these stores require.
bool streams_past_caches(const Bags& bags, int64_t elements) {
  constexpr int64_t kLarge = (8 << 20) / sizeof(float);
  bool aligned = elements > kLarge;
  for (int64_t s = 0; s < bags.segment_count; ++s)
    aligned &= bags.segments[s].out_offset % 4 == 0 && bags.segments[s].out_stride % 4 == 0;
  return aligned;
}

}  // namespace

void pool(const PooledBags& given, const Tensor& out) {
  const PreparedTables& tables = given.tables;
  const Bags bags = given.lists.view();
  const auto* rows = const_data<int64_t>(given.rows);
  check_rows_of_bags(given.op, bags, tables.layout, rows);
  dispatch_row_type(given.op, tables.row_type, [&](auto row_zero) {
    using T = decltype(row_zero);
    const std::vector<RowBlocks<T>> row_tables = tables.all_rows<T>();
    dispatch_row_type(given.op, out.scalar_type(), [&](auto out_zero) {
      const bool streams = sizeof(out_zero) == sizeof(float) && streams_past_caches(bags, out.numel());
      const PoolJob<T> job{
          bags, row_tables, rows, given.bag_weights, given.mean, streams, given.initial_ids, tables.initial.data()};
      auto* place = mutable_data<decltype(out_zero)>(out);
      const int64_t columns = most_columns(tables);
      const int64_t sum_columns = sizeof(out_zero) == sizeof(float) && given.initial_ids == nullptr ? 0 : columns;
      for_each_range(bags.total(), 64, [&](int64_t begin, int64_t end) {
        const auto sums = numbers_of<float>(sum_columns);
        for_bags(bags, begin, end, [&](const Segment& segment, int64_t first, int64_t last) {
          at_level([&](auto level) __attribute__((always_inline)) {
            pool_segment<level.kBytes>(job, segment, first, last, sums.get(), place);
          });
        });
        if (streams) finish_stores_past_caches();
        if (given.initial_ids == nullptr) return;
        const auto memory = numbers_of<T>(columns);
        for_bags(bags, begin, end, [&](const Segment& segment, int64_t first, int64_t last) {
          pool_initial_rows(job, segment, first, last, memory.get(), sums.get(), place);
        });
      });
    });
  });
}

namespace {

Tensor gather_pool(const GatherPoolCall& call) {
  const PreparedTables tables = call.tables(DeviceType::CPU);
  const PooledBags bags = call.bags(tables, true);
  Tensor out = new_output(call.elements, call.dtype);
  pool(bags, out);
  return out;
}

void pool_prepared_(const PoolPreparedCall& call) { pool(call.bags(true), call.out); }

// d loss / d bag_weight[i] = <grad[bag of i], weights[rows[i]]>, divided by the bag's length for the mean.
template <typename T>
void dot_segment(const PoolJob<T>& job, const Segment& segment, int64_t first, int64_t last, const float* grad,
                 T* memory, float* out) {
  const RowBlocks<T>& table = job.tables[static_cast<size_t>(segment.table)];
  for (int64_t bag = first; bag < last; ++bag) {
    const float* bag_grad = grad + segment.out_offset + (bag - segment.first_bag) * segment.out_stride;
    const int64_t begin = job.bags.begin(bag);
    const int64_t end = job.bags.end(bag);
    for (int64_t i = begin; i < end; ++i) {
      const T* row = job.rows[i] < 0 ? job.initial_row(i, segment.table, memory) : table.row(job.rows[i]);
      if (row == nullptr) continue;
      double dot = 0.0;
      for (int64_t c = 0; c < table.columns; ++c) dot += static_cast<double>(bag_grad[c]) * to_float(row[c]);
      out[i] = static_cast<float>(job.mean ? dot / static_cast<double>(end - begin) : dot);
    }
  }
}

Tensor weights_grad_prepared(const WeightsGradCall& call) {
  const PreparedTables& tables = *call.tables;
  const PooledBags given = call.bags(true);
  const Bags bags = given.lists.view();
  const auto* rows = const_data<int64_t>(call.rows);
  check_rows_of_bags(given.op, bags, tables.layout, rows);
  Tensor out = new_tensor({call.rows.numel()}, ScalarType::Float);
  float* place = mutable_data<float>(out);
  std::fill(place, place + call.rows.numel(), 0.0f);
  dispatch_row_type(given.op, tables.row_type, [&](auto zero) {
    using T = decltype(zero);
    const std::vector<RowBlocks<T>> row_tables = tables.all_rows<T>();
    const PoolJob<T> job{bags, row_tables, rows, nullptr, call.mean, false, given.initial_ids, tables.initial.data()};
    for_each_range(bags.total(), 64, [&](int64_t begin, int64_t end) {
      const auto memory = numbers_of<T>(given.initial_ids == nullptr ? 0 : most_columns(tables));
      for_bags(bags, begin, end, [&](const Segment& segment, int64_t first, int64_t last) {
        dot_segment(job, segment, first, last, const_data<float>(call.grad), memory.get(), place);
      });
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("gather_pool", &gather_pool));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("pool_prepared_", &pool_prepared_));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("weights_grad_prepared", &weights_grad_prepared));
}

}  // namespace torchrec_dyn
