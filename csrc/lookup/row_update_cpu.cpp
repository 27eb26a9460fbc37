// The backward of a lookup on the CPU: dedupe the rows of a batch, sum their gradients, update in place.
//
// A task owns the rows of one table whose low bits equal its part number. So no two tasks touch the same row, and one
// thread sums the gradients of a row, in the order of row_update.h. Rows are updated in the order in which they first
// occur in the batch: most rows occur once, and the gradient of the row's bag is then in cache.
#include <algorithm>
#include <atomic>
#include <span>
#include <vector>

#include "floats16_cpu.h"
#include "lookup/bags.h"
#include "lookup/row_runs_cpu.h"
#include "lookup/row_update.h"
#include "lookup/row_update_arguments.h"
#include "lookup/table_segments_cpu.h"
#include "lookup/update_workspace_cpu.h"
#include "parallel.h"
#include "row_parts_cpu.h"
#include "simd.h"
#include "storage/rounding_cpu.h"
#include "storage/row_access_cpu.h"

namespace torchrec_dyn {
namespace {

// The gradient of each id: its bag's place in grad, and its scale.
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

struct UpdateJob {
  const Bags& bags;
  const GradPlaces& places;
  const float* grad;
  const int64_t* ids;
  const int64_t* rows;
  const float* bag_weights;  // or null
  const Senders& senders;
  const UpdateRule& rule;
};

// The rows of a part, with all data that their updates read.
template <typename T>
struct Runs {
  const UpdateJob& job;
  const UpdatedTable<T>& table;
  std::span<const Run> runs;
  const uint32_t* positions;
  bool grads_come;  // they were prefetched while the ids were grouped

  const float* grad_at(uint32_t position) const { return job.grad + job.places.place[job.places.bag(position)]; }
  float scale_at(uint32_t position) const {
    const float weight = job.bag_weights ? job.bag_weights[position] : 1.0f;
    return job.places.scale.empty() ? weight : weight * job.places.scale[job.places.bag(position)];
  }
  bool is_scaled() const { return job.bag_weights || !job.places.scale.empty(); }
};

// So many gradients of a row are prefetched with the row; the others, of a popular row, before each piece.
constexpr uint32_t kMostGrads = 8;

// Adds up scale * grad over positions [begin, end), piece by piece (row_update.h): kParts * 16 columns from
// `column` on. kBytes: of a register.
template <int64_t kBytes, int64_t kParts, typename T>
TORCHREC_DYN_INLINE void sum_lanes(const Runs<T>& all, const uint32_t* begin, const uint32_t* end, int64_t column,
                                   float* out) {
  Floats16<kBytes> sums[kParts];
  Floats16<kBytes> lanes;
  for (const uint32_t* piece = begin; piece < end;) {
    const uint32_t* const piece_end = end - piece > kPieceIds ? piece + kPieceIds : end;
    if (column == 0)
      for (int64_t i = piece == begin ? kMostGrads : 0; i < piece_end - piece; ++i)
        prefetch_row(all.grad_at(piece[i]), all.table.weights.columns);
    for (int64_t p = 0; p < kParts; ++p) {
      sums[p].load(all.grad_at(*piece) + column + p * kLanes);
      sums[p] *= all.scale_at(*piece);
    }
    for (const uint32_t* position = piece + 1; position < piece_end; ++position) {
      const float scale = all.scale_at(*position);
      const float* grad = all.grad_at(*position) + column;
      for (int64_t p = 0; p < kParts; ++p) {
        lanes.load(grad + p * kLanes);
        lanes *= scale;
        sums[p] += lanes;
      }
    }
#pragma GCC unroll 4
    for (int64_t p = 0; p < kParts; ++p) {
      if (piece != begin) {
        lanes.load(out + p * kLanes);
        lanes += sums[p];
        sums[p] = lanes;
      }
      sums[p].store(out + p * kLanes);
    }
    piece = piece_end;
  }
}

// The same for the last columns, of which there are fewer than 16.
template <typename T>
TORCHREC_DYN_INLINE void sum_columns(const Runs<T>& all, const uint32_t* begin, const uint32_t* end, int64_t column,
                                     int64_t columns, float* out) {
  float sums[kLanes];
  for (const uint32_t* piece = begin; piece < end;) {
    const uint32_t* const piece_end = end - piece > kPieceIds ? piece + kPieceIds : end;
    float* const to = piece == begin ? out : sums;
    for (const uint32_t* position = piece; position < piece_end; ++position) {
      const float scale = all.scale_at(*position);
      const float* grad = all.grad_at(*position) + column;
      for (int64_t c = 0; c < columns; ++c) to[c] = position == piece ? scale * grad[c] : to[c] + scale * grad[c];
    }
    for (int64_t c = 0; to != out && c < columns; ++c) out[c] += sums[c];
    piece = piece_end;
  }
}

template <int64_t kBytes, typename T>
TORCHREC_DYN_INLINE void sum_grads(const Runs<T>& all, const uint32_t* begin, const uint32_t* end, int64_t columns,
                                   float* out) {
  int64_t c = 0;
  for (; columns - c >= 4 * kLanes; c += 4 * kLanes) sum_lanes<kBytes, 4>(all, begin, end, c, out + c);
  for (; columns - c >= kLanes; c += kLanes) sum_lanes<kBytes, 1>(all, begin, end, c, out + c);
  if (c < columns) sum_columns(all, begin, end, c, columns - c, out + c);
}

// Runs are prefetched kAhead runs before their update, kBurst at a time: a row is usually on a new page, and the fewer
// instructions between two new pages, the more page walks overlap. For the same reason weights, optimizer states and
// gradients have a tight loop each, and the update finds their addresses in a ring (benchmarks/DEAD_ENDS.md).
constexpr size_t kAhead = 32;
constexpr size_t kBurst = 8;
constexpr size_t kRing = 64;  // at least kAhead + kBurst; a power of 2

// A row and its states: where an update writes.
template <typename T>
struct RowAndStates {
  T* weights;
  float* states[kMostStates];
};

// The memory that the update of a run touches.
template <typename T>
struct Memory {
  RowAndStates<T> row;
  uint8_t* mark;
  const float* grad;  // of the first position
};

// Prefetches the memory of runs [begin, end) into L2, and writes its addresses to the ring.
template <typename T>
TORCHREC_DYN_INLINE void prefetch_runs(const Runs<T>& all, const UpdatedTable<T>& table, size_t begin, size_t end,
                                       Memory<T>* ring) {
  const int64_t columns = table.weights.columns;
  end = std::min(end, all.runs.size());
  const Run* const runs = all.runs.data();
  for (size_t r = begin; r < end; ++r) {
    T* row = table.weights.row(runs[r].row);
    ring[r % kRing].row.weights = row;
    prefetch_row(row, columns);
  }
  for (int s = 0; s < kMostStates; ++s)
    if (const RowBlocks<float>& state = table.states[s]; state.columns > 0)
      for (size_t r = begin; r < end; ++r) {
        float* row = state.row(runs[r].row);
        ring[r % kRing].row.states[s] = row;
        prefetch_row(row, state.columns);
      }
  if (table.marks.capacity > 0)
    for (size_t r = begin; r < end; ++r) {
      uint8_t* mark = table.marks.byte(runs[r].row);
      ring[r % kRing].mark = mark;
      __builtin_prefetch(mark, 1, 2);
    }
  const float* last = nullptr;
  const auto prefetch_grad = [&](const float* grad) __attribute__((always_inline)) {
    if (grad != last) prefetch_row(grad, columns);
    last = grad;
  };
  for (size_t r = begin; r < end; ++r) {
    const uint32_t first = runs[r].begin();
    const float* grad = all.grad_at(all.positions[first]);
    ring[r % kRing].grad = grad;
    if (all.grads_come) continue;
    prefetch_grad(grad);
    for (uint32_t i = first + 1; i < std::min(runs[r].end, first + kMostGrads); ++i)
      prefetch_grad(all.grad_at(all.positions[i]));
  }
}

template <typename T>
TORCHREC_DYN_INLINE bool are_finite(const T* numbers, int64_t count) {
  int infinite = 0;  // a sum: the loop vectorises
  for (int64_t i = 0; i < count; ++i) infinite += static_cast<int>(!is_finite(to_float(numbers[i])));
  return infinite == 0;
}

// Copies of rows on which updates are tried.
template <typename T>
class RowCopies {
 public:
  TORCHREC_DYN_INLINE RowCopies(const UpdatedTable<T>& table, Line* memory) : columns_(table.weights.columns) {
    const size_t lines = lines_of(static_cast<size_t>(columns_));
    copy_.weights = reinterpret_cast<T*>(memory);
    for (int s = 0; s < kMostStates; ++s) {
      state_columns_[s] = table.states[s].columns;
      copy_.states[s] = memory[(1 + static_cast<size_t>(s)) * lines].floats;
    }
  }

  TORCHREC_DYN_INLINE const RowAndStates<T>& copy_of(const RowAndStates<T>& row) {
    copy(row, copy_);
    return copy_;
  }
  TORCHREC_DYN_INLINE bool is_finite() const {
    bool is_finite = are_finite(copy_.weights, columns_);
    for (int s = 0; s < kMostStates; ++s) is_finite = is_finite && are_finite(copy_.states[s], state_columns_[s]);
    return is_finite;
  }
  TORCHREC_DYN_INLINE void write(const RowAndStates<T>& row) const { copy(copy_, row); }

 private:
  TORCHREC_DYN_INLINE void copy(const RowAndStates<T>& from, const RowAndStates<T>& to) const {
    std::copy_n(from.weights, columns_, to.weights);
    for (int s = 0; s < kMostStates; ++s) std::copy_n(from.states[s], state_columns_[s], to.states[s]);
  }

  int64_t columns_;
  int64_t state_columns_[kMostStates];  // 0: there is no such state
  RowAndStates<T> copy_;
};

// What an update does with a row that would not be finite: kPlain does not look. kGuarded leaves it as it was, kTrial
// leaves every row.
enum class Pass { kPlain, kGuarded, kTrial };

// Returns the number of rows that would not be finite. kCommon: of a rule that is_common. The code of the others in the
// same loop takes registers from it: some 5 % of the backward of bags of 20 ids, measured. kColumns: of a row, or any
// number if that is 0. Loops over 16 columns are one register each, without which the update took 4 to 8 % longer.
template <int64_t kBytes, bool kLooks, bool kCommon, int64_t kColumns, typename T>
TORCHREC_DYN_INLINE int64_t update_runs_of(const Runs<T>& shared, const Workspace& workspace, Pass pass) {
  const Runs<T> all = shared;  // copies: the compiler sees that no store changes them
  const UpdateJob job = all.job;
  UpdatedTable<T> table = all.table;
  if (kColumns > 0) table.weights.columns = kColumns;
  const std::span<const Run> runs = all.runs;
  const int64_t columns = table.weights.columns;
  float* const sum = workspace.sum.get();
  float* const values = workspace.lines.get()->floats;  // of a row shorter than float32
  std::fill(workspace.last_row.get(), workspace.last_row.get() + workspace.senders, 0u);
  SenderCount senders(job.senders, workspace.last_row.get());
  const float* squared = nullptr;  // the gradient whose square is `square`: the ids of a bag share it
  float square = 0.0f;
  const bool is_scaled = all.is_scaled() || table.grad_scale != 1.0f || job.senders.of_id;
  RowCopies<T> copies(table, workspace.copy.get());
  int64_t nonfinite = 0;
  Memory<T> ring[kRing] = {};
  prefetch_runs(all, table, 0, kAhead, ring);
  for (size_t r = 0; r < runs.size(); ++r) {
    if (r % kBurst == 0) prefetch_runs(all, table, r + kAhead, r + kAhead + kBurst, ring);
    const Run& run = runs[r];
    const Memory<T> memory = ring[r % kRing];
    const uint32_t* const begin = all.positions + run.begin();
    const uint32_t* const end = all.positions + run.end;
    const float* grad = memory.grad;
    if (end != begin + 1 || is_scaled) {
      float scale = table.grad_scale;
      if (job.senders.of_id) {
        senders.next_row();
        for (const uint32_t* position = begin; position < end; ++position) senders.add(*position);
        scale /= static_cast<float>(senders.distinct());
      }
      grad = sum;
      sum_grads<kBytes>(all, begin, end, columns, sum);
      if (scale != 1.0f)
        for (int64_t c = 0; c < columns; ++c) sum[c] *= scale;
    }
    const RowAndStates<T> to = kLooks ? copies.copy_of(memory.row) : memory.row;
    T* row = to.weights;
    float* weight = nullptr;
    if constexpr (sizeof(T) == sizeof(float)) {
      weight = row;
    } else {
      weight = values;
      int64_t c = 0;
      Floats16<kBytes> lanes;
      for (; columns - c >= kLanes; c += kLanes) {
        load_row(row + c, lanes);
        lanes.store(weight + c);
      }
      for (; c < columns; ++c) weight[c] = to_float(row[c]);
    }
    if (grad != squared || grad == sum || job.rule.square_reads_weights()) {
      square = row_square(job.rule, grad, weight, columns);
      squared = grad;
    }
    if constexpr (kCommon) {
      update_common_row(job.rule, table.correction, square, grad, weight, to.states[0], to.states[1], columns);
    } else {
      float ratio = 1.0f;
      if (job.rule.has_ratio()) {
        float* const measured = workspace.measured.get();
        measure_columns(job.rule, table.correction, square, grad, weight, to.states, measured, columns);
        ratio = ratio_of(job.rule, sum_of_squares<false>(measured, nullptr, 0.0f, columns),
                         sum_of_squares<false>(weight, nullptr, 0.0f, columns));
      }
      update_rare_row(job.rule, table.correction, square, ratio, grad, weight, to.states, columns);
    }
    if constexpr (sizeof(T) != sizeof(float))
      store_row(table.stream.rounding_key, table.stream.step, table.stream.first_column, job.ids[*begin], values,
                columns, row);
    if constexpr (kLooks) {
      const bool is_finite = copies.is_finite();
      nonfinite += static_cast<int64_t>(!is_finite);
      if (!is_finite || pass == Pass::kTrial) continue;
      copies.write(memory.row);
    }
    if (table.marks.capacity > 0) mark_bit(memory.mark, run.row);
  }
  return nonfinite;
}

template <bool kLooks, typename T>
int64_t update_runs(const Runs<T>& all, const Workspace& workspace, Pass pass) {
  return at_level([&](auto level) __attribute__((always_inline)) {
    if (!all.job.rule.is_common()) return update_runs_of<level.kBytes, kLooks, false, 0>(all, workspace, pass);
    if constexpr (!kLooks && sizeof(T) == sizeof(float))
      if (all.table.weights.columns == kLanes)
        return update_runs_of<level.kBytes, kLooks, true, kLanes>(all, workspace, pass);
    return update_runs_of<level.kBytes, kLooks, true, 0>(all, workspace, pass);
  });
}

// One part may have all ids of its table.
PartSize largest_part(const std::vector<int64_t>& ids, const std::vector<TableLayout>& tables) {
  PartSize most;
  for (size_t t = 0; t < tables.size(); ++t)
    if (ids[t] > 0)
      most = {std::max(most.ids, static_cast<size_t>(ids[t])),
              std::max(most.columns, static_cast<size_t>(tables[t].columns))};
  return most;
}

// Gradients of bags of one id each are prefetched while the ids are grouped, if all of a part stay in half of a
// second-level cache of 512 KB. (Later ids of a longer bag have its gradient in a cache anyway.)
constexpr size_t kMostEarlyGrads = (size_t{256} << 10) / sizeof(float);

// Returns the number of rows that would not be finite.
template <typename T>
int64_t run_part(const UpdateJob& job, const TableSegments& segments, const UpdatedTable<T>& table, const RowPart& part,
                 Pass pass, Workspace& workspace) {
  const int64_t mask = part.parts - 1, columns = table.weights.columns;
  RowRuns& rows = workspace.rows;
  rows.clear();
  segments.visit(static_cast<size_t>(part.table), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      rows.add_if(job.rows[i] >= 0 && (job.rows[i] & mask) == part.part, job.rows[i], static_cast<uint32_t>(i));
  });
  const bool grads_come = job.places.bag_of.empty() && rows.size() * static_cast<size_t>(columns) <= kMostEarlyGrads;
  if (grads_come)
    rows.group([&](uint32_t position)
                   __attribute__((always_inline)) { prefetch_row(job.grad + job.places.place[position], columns); });
  else
    rows.group([](uint32_t) __attribute__((always_inline)) {});
  const Runs<T> all{job, table, rows.runs(), rows.positions(), grads_come};
  if (all.runs.empty()) return 0;
  return pass == Pass::kPlain ? update_runs<false>(all, workspace, pass) : update_runs<true>(all, workspace, pass);
}

// The parts of a call that has several threads: enough that no thread waits for long.
int64_t least_parts(int64_t ids) { return thread_count() <= 1 || ids < 4096 ? 1 : 4 * thread_count(); }

Pass pass_of(OnNonfinite what, bool is_trial) {
  if (is_trial) return what == OnNonfinite::kWrite ? Pass::kPlain : Pass::kTrial;
  return what == OnNonfinite::kSkip ? Pass::kGuarded : Pass::kPlain;
}

// Returns the number of rows because of which the call is an error.
int64_t refused_rows(const std::vector<int64_t>& nonfinite, const std::vector<OnNonfinite>& tables) {
  int64_t rows = 0;
  for (size_t t = 0; t < tables.size(); ++t) rows += tables[t] == OnNonfinite::kError ? nonfinite[t] : 0;
  return rows;
}

// Reads and checks the senders of all ids.
Senders read_senders(const char* op, const std::optional<Tensor>& given, int64_t ids) {
  const auto* sender = const_data<int32_t>(given);
  if (sender == nullptr) return {};
  int32_t lowest = -1;
  int32_t highest = -1;
  for (int64_t i = 0; i < ids; ++i) {
    lowest = std::min(lowest, sender[i]);
    highest = std::max(highest, sender[i]);
  }
  check_sender_range(op, lowest, highest);
  return {sender, highest + 1};
}

// Checks the steps of the tables that have rows in the batch.
void check_steps(const char* op, const Tensor& streams, const UpdateArguments& read, const TableSegments& segments,
                 const int64_t* rows) {
  const int64_t* stream = const_data<int64_t>(streams);
  for (int64_t t = 0; t < streams.numel() / 3; ++t, stream += 3) {
    if (may_have_rows(read.rule, stream[2])) continue;
    segments.visit(static_cast<size_t>(t), [&](int64_t begin, int64_t end) {
      check_step(op, std::all_of(rows + begin, rows + end, [](int64_t row) { return row < 0; }), stream[2]);
    });
  }
}

void update(const char* op, const UpdateBatch& call, const PreparedTables& prepared) {
  const UpdateArguments read = read_update(op, call, prepared, true);
  const Bags bags = read.bags.view();
  const int64_t ids = call.ids.numel();
  const auto* row = const_data<int64_t>(call.rows);
  check_rows_of_bags(op, bags, updated_rows(read, prepared.layout), row);
  const Senders sent = read_senders(op, call.senders, ids);
  const TableSegments segments(bags, prepared.count());
  check_steps(op, call.streams, read, segments, row);
  const GradPlaces places = find_grad_places(bags, ids, call.mean);
  dispatch_row_type(op, prepared.row_type, [&](auto zero) {
    using T = decltype(zero);
    const UpdatedTables<T> updated(op, call, read, prepared);
    const UpdateJob job{
        bags, places,   const_data<float>(call.grad), const_data<int64_t>(call.ids), row, read.bag_weights,
        sent, read.rule};
    const std::vector<int64_t> table_ids = segments.ids();
    const std::vector<RowPart> parts = row_parts(table_ids, least_parts(ids));
    const auto tasks = static_cast<int64_t>(parts.size());
    const int64_t workers = worker_count(tasks);
    const PartSize most = largest_part(table_ids, prepared.layout);
    thread_local Workspaces kept;  // one for each row type
    std::vector<Workspace>& workspaces =
        kept.of(workers, most, sizeof(T) == sizeof(float), sent.of_id ? static_cast<size_t>(sent.ranks) + 1 : 0);
    // Returns for each table the number of rows that would not be finite.
    const auto run = [&](bool is_trial) {
      std::vector<int64_t> nonfinite(prepared.count());
      for_each_task_of(workers, tasks, [&](int64_t task, int64_t worker) {
        const RowPart& part = parts[static_cast<size_t>(task)];
        const auto t = static_cast<size_t>(part.table);
        const Pass pass = pass_of(prepared.on_nonfinite[t], is_trial);
        if (is_trial && pass == Pass::kPlain) return;
        const int64_t rows =
            run_part(job, segments, updated.tables[t], part, pass, workspaces[static_cast<size_t>(worker)]);
        if (rows > 0) std::atomic_ref<int64_t>(nonfinite[t]).fetch_add(rows, std::memory_order_relaxed);
      });
      return nonfinite;
    };
    int64_t refused = 0;
    std::vector<int64_t> nonfinite;
    if (has(prepared.on_nonfinite, OnNonfinite::kError)) {
      nonfinite = run(true);
      refused = refused_rows(nonfinite, prepared.on_nonfinite);
    }
    if (refused == 0) nonfinite = run(false);
    for (size_t t = 0; t < prepared.nonfinite.size(); ++t) *prepared.nonfinite[t] += nonfinite[t];
    kept.release_large();
    check_nonfinite(op, refused);
  });
}

void update_rows_(const UpdateCall& call) { update("update_rows_", call.batch, call.tables(DeviceType::CPU)); }

void update_prepared_(const PreparedUpdateCall& call) { update("update_prepared_", call.batch, *call.tables); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("update_rows_", &update_rows_));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("update_prepared_", &update_prepared_));
}

}  // namespace torchrec_dyn
