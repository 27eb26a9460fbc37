// Rows that come and go on the CPU: their numbers, contents, scores and ids, of all prepared tables in one call.
#include <memory>
#include <vector>

#include "lookup/row_changes_arguments.h"
#include "parallel.h"
#include "storage/id_map_changes_cpu.h"
#include "storage/initial_writes_cpu.h"

namespace torchrec_dyn {
namespace {

void number_rows(const AddedRows& added, int64_t* row) {
  const int64_t* const again = const_data<int64_t>(added.reused);
  for (size_t t = 0; t < added.first_rows.size(); ++t) {
    int64_t* next = row + added.offsets[t];
    for (int64_t i = added.reused_offsets[t]; i < added.reused_offsets[t + 1]; ++i) *next++ = again[i];
    for (int64_t fresh = added.first_rows[t]; next < row + added.offsets[t + 1]; ++fresh) *next++ = fresh;
  }
}

// Checks rows of each table, its own from offsets [T + 1] on.
void check_new_rows(const char* op, const PreparedTables& tables, const int64_t* row, const int64_t* offsets) {
  for (size_t t = 0; t < tables.count(); ++t)
    for (int64_t i = offsets[t]; i < offsets[t + 1]; ++i) {
      const int64_t capacity = capacity_of(tables, t);
      check_new_row(op, row[i] >= 0 && row[i] < capacity, row[i], capacity);
    }
}

void init_rows(const AddedRows& added, const PreparedTables& tables, const int64_t* id, const int64_t* row) {
  const RuleFacts facts = rule_facts(tables.optimizer);
  dispatch_row_type(added.op, tables.row_type, [&](auto zero) {
    for (size_t t = 0; t < tables.count(); ++t) {
      const int64_t begin = added.offsets[t], count = added.count(t);
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

}  // namespace

Write prepare(const AddedRows& added, const PreparedTables& tables) {
  const int64_t* const id = const_data<int64_t>(added.new_ids);
  int64_t* const row = mutable_data<int64_t>(added.new_rows);
  const auto change = std::make_shared<MapChange>(tables.maps, id, added.offsets.data());
  check_new_rows(added.op, tables, const_data<int64_t>(added.reused), added.reused_offsets.data());
  if (added.initial_places)
    check_new_rows(added.op, tables, const_data<int64_t>(*added.initial_places), added.offsets.data());
  return [=, &added, &tables] {
    number_rows(added, row);
    if (has_rows(tables)) init_rows(added, tables, id, added.initial_rows());
    for (size_t t = 0; t < tables.count(); ++t)
      if (has_scores(tables, t))
        write_scores(tables.scores[t], row, added.offsets[t], added.offsets[t + 1],
                     [&](int64_t i) { return score_of(added.steps[t], first_count(added.first_counts(), i)); });
    check_inserted(added.op, change->insert(row));
    if (!added.rows) return;
    const FillNew fill = added.fill_new(row);
    constexpr int64_t kFillGrain = 1 << 14;
    for_each_range(added.rows->numel(), kFillGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) fill(i);
    });
  };
}

Write prepare(const RemovedRows& removed, const PreparedTables& tables) {
  const int64_t* const offset = removed.offsets.data();
  const int64_t* const row = const_data<int64_t>(removed.rows);
  check_new_rows(removed.op, tables, row, offset);
  const auto held = std::make_shared<std::vector<int64_t>>(static_cast<size_t>(removed.ids.numel()));
  const auto change = std::make_shared<MapChange>(tables.maps, const_data<int64_t>(removed.ids), offset);
  return [=, &tables] {
    change->erase(held->data());
    for (size_t t = 0; t < tables.count(); ++t)
      if (has_scores(tables, t))
        write_scores(tables.scores[t], row, offset[t], offset[t + 1], [](int64_t) { return kFreeScore; });
  };
}

static void commit_step_(const CommitStepCall& call) {
  call.check();
  std::vector<Write> writes;
  const auto prepare_all = [&](const StepOfRows& step, const PreparedTables& tables) {
    writes.push_back(prepare(step.seen, tables));
    writes.push_back(prepare(step.removed, tables));
    writes.push_back(prepare(step.added, tables));
  };
  if (call.counters) prepare_all(call.waiting, *call.counters);
  prepare_all(call.rows, *call.tables);
  for (const Write& write : writes) write();
}

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("add_rows_", &write_part<AddedRows>));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("remove_rows_", &write_part<RemovedRows>));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("commit_step_", &commit_step_));
}

}  // namespace torchrec_dyn
