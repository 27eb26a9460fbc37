// Rows that come and go on the CPU: their numbers, contents, scores and ids, of all prepared tables in one call.
#include <vector>

#include "lookup/row_changes_arguments.h"
#include "parallel.h"
#include "storage/id_map_changes_cpu.h"
#include "storage/initial_writes_cpu.h"

namespace torchrec_dyn {
namespace {

void number_rows(const AddRowsCall& call, int64_t* row) {
  const PreparedTables& tables = *call.tables;
  const int64_t* const again = const_data<int64_t>(call.reused);
  for (size_t t = 0; t < tables.count(); ++t)
    for (int64_t i = call.reused_offsets[t]; i < call.reused_offsets[t + 1]; ++i) {
      const int64_t capacity = capacity_of(tables, t);
      check_new_row(AddRowsCall::kOp, again[i] >= 0 && again[i] < capacity, again[i], capacity);
    }
  for (size_t t = 0; t < tables.count(); ++t) {
    int64_t* next = row + call.offsets[t];
    for (int64_t i = call.reused_offsets[t]; i < call.reused_offsets[t + 1]; ++i) *next++ = again[i];
    for (int64_t fresh = call.first_rows[t]; next < row + call.offsets[t + 1]; ++fresh) *next++ = fresh;
  }
}

void init_rows(const AddRowsCall& call, const int64_t* id, const int64_t* row) {
  const PreparedTables& tables = *call.tables;
  const RuleFacts facts = rule_facts(tables.optimizer);
  dispatch_row_type(AddRowsCall::kOp, tables.row_type, [&](auto zero) {
    for (size_t t = 0; t < tables.count(); ++t) {
      const int64_t begin = call.offsets[t], count = call.count(t);
      if (count == 0) continue;
      const InitialTable& initial = tables.initial[t];
      write_initial_rows(initial.rows, initial.key, initial.first_column, id + begin, row + begin, count,
                         tables.rows<decltype(zero)>(t));
      for (int s = 0; s < facts.state_count(); ++s) {
        InitialRows constant{};
        constant.low = static_cast<double>(tables.initial_states[static_cast<size_t>(s)]);
        write_initial_rows(constant, 0, 0, id + begin, row + begin, count, tables.state(t, s, facts.states[s]));
      }
    }
  });
}

// Writes the score of each of the rows [begin, end) of a batch.
template <typename Score>
void write_scores(const ScoreBlocks& scores, const int64_t* rows, int64_t begin, int64_t end, const Score& score_at) {
  for (int64_t i = begin; i < end; ++i) {
    if ((i - begin) % kScoreBurst == 0) prefetch_scores(scores, rows, i, end);
    *scores.word(rows[i]) = score_at(i);
  }
}

void add_rows_(const AddRowsCall& call) {
  call.check();
  const PreparedTables& tables = *call.tables;
  const int64_t* const id = const_data<int64_t>(call.new_ids);
  int64_t* const row = mutable_data<int64_t>(call.new_rows);
  MapChange change(tables.maps, id, call.offsets.data());
  number_rows(call, row);
  if (has_rows(tables)) init_rows(call, id, row);
  for (size_t t = 0; t < tables.count(); ++t)
    if (has_scores(tables, t))
      write_scores(tables.scores[t], row, call.offsets[t], call.offsets[t + 1],
                   [&](int64_t i) { return score_of(call.steps[t], first_count(call.first_counts(), i)); });
  check_inserted(AddRowsCall::kOp, change.insert(row));
  if (!call.rows) return;
  const FillNew fill = call.fill_new(row);
  constexpr int64_t kFillGrain = 1 << 14;
  for_each_range(call.rows->numel(), kFillGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) fill(i);
  });
}

void remove_rows_(const RemoveRowsCall& call) {
  call.check();
  const PreparedTables& tables = *call.tables;
  const int64_t* const offset = const_data<int64_t>(call.table_offsets);
  const int64_t* const row = const_data<int64_t>(call.rows);
  for (size_t t = 0; t < tables.count(); ++t)
    for (int64_t i = offset[t]; i < offset[t + 1]; ++i) {
      const int64_t capacity = capacity_of(tables, t);
      check_new_row(RemoveRowsCall::kOp, row[i] >= 0 && row[i] < capacity, row[i], capacity);
    }
  std::vector<int64_t> held(static_cast<size_t>(call.ids.numel()));
  MapChange(tables.maps, const_data<int64_t>(call.ids), offset).erase(held.data());
  for (size_t t = 0; t < tables.count(); ++t)
    if (has_scores(tables, t))
      write_scores(tables.scores[t], row, offset[t], offset[t + 1], [](int64_t) { return kFreeScore; });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("add_rows_", &add_rows_));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("remove_rows_", &remove_rows_));
}

}  // namespace torchrec_dyn
