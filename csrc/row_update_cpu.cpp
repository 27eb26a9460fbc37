// The backward of a lookup on the CPU: dedupe the rows of a batch, sum their gradients, update in place.
//
// A task owns the rows of one table whose low bits equal its part number, so no two tasks touch one row and
// the sums of a row are made by one thread in the order of the batch.
#include <limits>

#include "bags.h"
#include "parallel.h"
#include "radix_sort.h"
#include "rounding.h"
#include "row_update.h"
#include "simd.h"

namespace torchrec_dyn {
namespace {

// What stochastic rounding and bias correction are functions of: one line of `streams` [T, 3] int64.
struct Stream {
  uint64_t rounding_key;
  int64_t first_column;
  int64_t step;
};

// Where the gradient of each id is: its bag's place in grad, and what to scale it by.
struct GradPlaces {
  std::vector<uint32_t> bag_of;  // [N]; empty for sequences, where bag i is id i
  std::vector<int64_t> place;    // [bags] element of grad where the bag's row begins
  std::vector<float> scale;      // [bags] 1 / length for the mean; empty otherwise

  size_t bag(uint32_t position) const { return bag_of.empty() ? position : bag_of[position]; }
};

GradPlaces find_grad_places(const Bags& bags, int64_t ids, bool mean) {
  GradPlaces places;
  places.place.resize(static_cast<size_t>(bags.count));
  if (bags.offsets) places.bag_of.resize(static_cast<size_t>(ids));
  if (mean) places.scale.resize(static_cast<size_t>(bags.count));
  for_each_range(bags.total(), 256, [&](int64_t begin, int64_t end) {
    for_bags(bags, begin, end, [&](const Segment& segment, int64_t first, int64_t last) {
      for (int64_t bag = first; bag < last; ++bag) {
        places.place[static_cast<size_t>(bag)] = segment.out_offset + (bag - segment.first_bag) * segment.out_stride;
        if (mean) {
          const auto length = static_cast<float>(bags.end(bag) - bags.begin(bag));
          places.scale[static_cast<size_t>(bag)] = length > 0.0f ? 1.0f / length : 0.0f;
        }
        if (bags.offsets)
          std::fill(places.bag_of.begin() + bags.begin(bag), places.bag_of.begin() + bags.end(bag),
                    static_cast<uint32_t>(bag));
      }
    });
  });
  return places;
}

template <typename T>
struct UpdateJob {
  const Bags& bags;
  const GradPlaces& places;
  const float* grad;
  const int64_t* ids;
  const int64_t* rows;
  const float* bag_weights;  // or null
  const UpdateRule& rule;
};

template <typename T>
struct UpdateTable {
  RowBlocks<T> weights;
  RowBlocks<float> momentum1;
  RowBlocks<float> momentum2;
  Stream stream;
};

TORCHREC_DYN_INLINE float* state_row(const RowBlocks<float>& state, int64_t row) {
  return state.columns > 0 ? state.row(row) : nullptr;
}

// The sum over the words of a run of scale * grad, in their order.
template <typename T>
TORCHREC_DYN_INLINE void sum_grads(const UpdateJob<T>& job, const uint64_t* begin, const uint64_t* end, int64_t columns,
                                   float* sum) {
  for (const uint64_t* word = begin; word < end; ++word) {
    const auto position = static_cast<uint32_t>(*word);
    const size_t bag = job.places.bag(position);
    float scale = job.bag_weights ? job.bag_weights[position] : 1.0f;
    if (!job.places.scale.empty()) scale *= job.places.scale[bag];
    const float* grad = job.grad + job.places.place[bag];
    if (word == begin)
      for (int64_t c = 0; c < columns; ++c) sum[c] = scale * grad[c];
    else
      for (int64_t c = 0; c < columns; ++c) sum[c] += scale * grad[c];
  }
}

template <typename T>
TORCHREC_DYN_INLINE void prefetch_word(const UpdateJob<T>& job, const UpdateTable<T>& table, uint64_t word, int shift,
                                       int64_t part) {
  const auto position = static_cast<uint32_t>(word);
  const float* grad = job.grad + job.places.place[job.places.bag(position)];
  for (int64_t c = 0; c < table.weights.columns && c < 64; c += 16) __builtin_prefetch(grad + c, 0, 3);
  const int64_t row = static_cast<int64_t>(word >> 32 << shift) | part;
  prefetch_row(table.weights, row, true);
  if (table.momentum1.columns > 0) prefetch_row(table.momentum1, row, true);
  if (table.momentum2.columns > 0) prefetch_row(table.momentum2, row, true);
}

// `words`: (row >> shift) << 32 | position, sorted by row; row & (2^shift - 1) == part.
template <typename T>
TORCHREC_DYN_INLINE void update_sorted(const UpdateJob<T>& job, const UpdateTable<T>& table,
                                       const std::vector<uint64_t>& words, int shift, int64_t part) {
  constexpr size_t kAhead = 8;
  const int64_t columns = table.weights.columns;
  const BiasCorrection correction = bias_correction(job.rule, table.stream.step);
  std::vector<float> sum(static_cast<size_t>(columns));
  std::vector<float> values(static_cast<size_t>(columns));
  size_t ahead = 0;
  for (size_t begin = 0; begin < words.size();) {
    size_t end = begin + 1;
    while (end < words.size() && (words[end] >> 32) == (words[begin] >> 32)) ++end;
    for (; ahead < words.size() && ahead < end + kAhead; ++ahead) prefetch_word(job, table, words[ahead], shift, part);
    sum_grads(job, words.data() + begin, words.data() + end, columns, sum.data());
    const int64_t row = static_cast<int64_t>(words[begin] >> 32 << shift) | part;
    T* weight = table.weights.row(row);
    float* m1 = state_row(table.momentum1, row);
    float* m2 = state_row(table.momentum2, row);
    if constexpr (sizeof(T) == sizeof(float)) {
      update_row(job.rule, correction, sum.data(), weight, m1, m2, columns);
    } else {
      for (int64_t c = 0; c < columns; ++c) values[static_cast<size_t>(c)] = to_float(weight[c]);
      update_row(job.rule, correction, sum.data(), values.data(), m1, m2, columns);
      const Stream& stream = table.stream;
      store_row(stream.rounding_key, stream.step, stream.first_column, job.ids[static_cast<uint32_t>(words[begin])],
                values.data(), columns, weight);
    }
    begin = end;
  }
}

#define TORCHREC_DYN_UPDATE(T)                                                                 \
  TORCHREC_DYN_SIMD void update(const UpdateJob<T>& job, const UpdateTable<T>& table,          \
                                const std::vector<uint64_t>& words, int shift, int64_t part) { \
    update_sorted(job, table, words, shift, part);                                             \
  }
TORCHREC_DYN_UPDATE(float)
TORCHREC_DYN_UPDATE(Float16)
TORCHREC_DYN_UPDATE(BFloat16)

template <typename T>
void run_part(const UpdateJob<T>& job, const UpdateTable<T>& table, int64_t table_index, int shift, int64_t part) {
  const int64_t mask = (int64_t{1} << shift) - 1;
  std::vector<uint64_t> words;
  for (const Segment& segment : job.bags.segments) {
    if (segment.table != table_index || segment.bags == 0) continue;
    const int64_t end = job.bags.end(segment.first_bag + segment.bags - 1);
    for (int64_t i = job.bags.begin(segment.first_bag); i < end; ++i) {
      const int64_t row = job.rows[i];
      if (row >= 0 && (row & mask) == part)
        words.push_back(static_cast<uint64_t>(row >> shift) << 32 | static_cast<uint64_t>(i));
    }
  }
  sort_by_high_word(words);
  update(job, table, words, shift, part);
}

// Parts a table is cut into, as a power of two: enough that the threads share the work evenly.
int part_shift(int64_t tables, int64_t ids) {
  if (thread_count() <= 1 || ids < 4096) return 0;
  int shift = 0;
  while (shift < 6 && (tables << shift) < 4 * thread_count()) ++shift;
  return shift;
}

UpdateRule read_rule(int64_t optimizer, const std::vector<double>& hyper) {
  STD_TORCH_CHECK(optimizer >= 0 && optimizer <= 4, "update_rows_: expected optimizer in [0, 4], got ", optimizer, ".");
  check_size("update_rows_", "the number of hyper-parameters", 6, static_cast<int64_t>(hyper.size()));
  const auto mode = static_cast<int64_t>(hyper[5]);
  STD_TORCH_CHECK(mode >= 0 && mode <= 2, "update_rows_: expected weight_decay_mode in [0, 2], got ", mode, ".");
  return {static_cast<Optimizer>(optimizer), static_cast<WeightDecay>(mode), static_cast<float>(hyper[0]),
          static_cast<float>(hyper[1]),      static_cast<float>(hyper[2]),   static_cast<float>(hyper[3]),
          static_cast<float>(hyper[4])};
}

RowBlocks<float> state_blocks(const char* name, const std::vector<Tensor>& list, const TableLayout& table,
                              int64_t columns) {
  return columns == 0 ? RowBlocks<float>{} : row_blocks<float>("update_rows_", name, list, table, columns);
}

void update_rows_(const Tensor& grad, const Tensor& ids, const Tensor& rows, const std::optional<Tensor>& offsets,
                  const std::optional<Tensor>& bag_weights, std::vector<Tensor> weights, std::vector<Tensor> momentum1,
                  std::vector<Tensor> momentum2, const Tensor& layout, const Tensor& segments, const Tensor& streams,
                  bool mean, int64_t optimizer, std::vector<double> hyper) {
  const char* op = "update_rows_";
  check_tensor(op, "grad", grad, ScalarType::Float);
  check_tensor(op, "ids", ids, ScalarType::Long);
  check_tensor(op, "rows", rows, ScalarType::Long);
  check_tensor(op, "streams", streams, ScalarType::Long);
  check_size(op, "the number of rows", ids.numel(), rows.numel());
  STD_TORCH_CHECK(ids.numel() < std::numeric_limits<uint32_t>::max(), op, ": expected fewer than 2^32 - 1 ids, got ",
                  ids.numel(), ". Split the batch.");
  const std::vector<TableLayout> tables = read_layout(op, layout);
  const auto table_count = static_cast<int64_t>(tables.size());
  check_size(op, "the elements of streams", 3 * table_count, streams.numel());
  const Bags bags = read_bags(op, offsets, segments, tables, ids.numel(), grad.numel());
  check_rows_of_bags(op, bags, tables, const_data<int64_t>(rows));
  const float* weight = bag_weight_data(op, bag_weights, ids.numel());
  const UpdateRule rule = read_rule(optimizer, hyper);
  const GradPlaces places = find_grad_places(bags, ids.numel(), mean);
  dispatch_row_type(op, weights, [&](auto zero) {
    using T = decltype(zero);
    std::vector<UpdateTable<T>> update_tables;
    const int64_t* stream = const_data<int64_t>(streams);
    for (const TableLayout& table : tables) {
      STD_TORCH_CHECK((table.blocks << table.shift) <= (int64_t{1} << 32), op,
                      ": expected at most 2^32 rows a table, got room for ", table.blocks << table.shift, ".");
      update_tables.push_back({row_blocks<T>(op, "weights", weights, table, table.columns),
                               state_blocks("momentum1", momentum1, table, rule.momentum1_columns(table.columns)),
                               state_blocks("momentum2", momentum2, table, rule.momentum2_columns(table.columns)),
                               Stream{static_cast<uint64_t>(stream[0]), stream[1], stream[2]}});
      stream += 3;
    }
    const UpdateJob<T> job{bags,   places, const_data<float>(grad), const_data<int64_t>(ids), const_data<int64_t>(rows),
                           weight, rule};
    const int shift = part_shift(table_count, ids.numel());
    for_each_task(table_count << shift, [&](int64_t task) {
      const int64_t table = task >> shift;
      run_part(job, update_tables[static_cast<size_t>(table)], table, shift, task & ((int64_t{1} << shift) - 1));
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) { m.impl("update_rows_", TORCH_BOX(&update_rows_)); }

}  // namespace torchrec_dyn
