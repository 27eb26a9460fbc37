// Rows that come and go on a device: row_changes_cpu.cpp for CUDA.
#include <vector>

#include "device_call.h"
#include "lookup/row_changes_arguments.h"
#include "lookup/row_changes_kernels.h"
#include "lookup/sent_scores_arguments.h"
#include "sent_lists.h"
#include "storage/id_map_changes_arguments.h"
#include "storage/row_store_kernels.h"

namespace torchrec_dyn {
namespace {

// Prepares to write the initial rows of one table; blocks of `rows` are on the device, those of `host` on the host.
template <typename T>
void write_rows(DeviceCall& call, std::vector<Write>& writes, const char* op, const InitialTable& initial,
                const int64_t* ids, const int64_t* rows, int64_t count, const RowBlocks<T>& host, T* const* device,
                int64_t blocks) {
  uintptr_t bits = 0;
  for (int64_t b = 0; b < blocks; ++b) bits |= reinterpret_cast<uintptr_t>(host.blocks[b]);
  const GivenRows given{rows, count, 0, host.capacity, call.zeros<int64_t>(1), op, call.errors(raise_row_error)};
  RowBlocks<T> table = host;
  table.blocks = device;
  const int64_t first = initial.first_column, columns = table.columns;
  const int64_t threads = (first + columns - 1) / kThreadColumns - first / kThreadColumns + 1;
  const bool is_whole =
      first % kThreadColumns == 0 && columns % kThreadColumns == 0 && bits % (kThreadColumns * sizeof(T)) == 0;
  const InitRows<T> init{ids, given, table, initial.rows, initial.key, first, Division(threads), is_whole};
  writes.push_back([&call, given, init, count, threads] {
    simt::launch(call.stream(), count, FindRowOutside{given});
    simt::launch(call.stream(), count * threads, init);
  });
}

void init_rows(DeviceCall& call, std::vector<Write>& writes, const AddedRows& given, const PreparedTables& tables,
               const int64_t* all_ids, const int64_t* all_rows) {
  const RuleFacts facts = rule_facts(tables.optimizer);
  dispatch_row_type(given.op, tables.row_type, [&](auto zero) {
    using T = decltype(zero);
    const std::vector<T*>& weights = tables.blocks<T>();
    SentLists sent(call, bytes_of(weights) + bytes_of(tables.states));
    T* const* const device_weights = sent.add(weights);
    float* const* const device_states = sent.add(tables.states);
    sent.send();
    for (size_t t = 0; t < tables.count(); ++t) {
      const int64_t begin = given.offsets[t], n = given.count(t), first_block = tables.layout[t].first_block;
      if (n == 0) continue;
      const int64_t *ids = all_ids + begin, *rows = all_rows + begin;
      write_rows(call, writes, given.op, tables.initial[t], ids, rows, n, tables.rows<T>(t),
                 device_weights + first_block, tables.layout[t].blocks);
      for (int s = 0; s < facts.state_count(); ++s) {
        InitialTable constant{};
        constant.rows.low = static_cast<double>(tables.initial_states[static_cast<size_t>(s)]);
        const RowBlocks<float> state = tables.state(t, s, facts.states[s]);
        write_rows(call, writes, given.op, constant, ids, rows, n, state,
                   device_states + (state.blocks - tables.states.data()), tables.layout[t].blocks);
      }
    }
  });
}

bool has_any_scores(const PreparedTables& tables) {
  for (size_t t = 0; t < tables.count(); ++t)
    if (has_scores(tables, t)) return true;
  return false;
}

}  // namespace

Write prepare(DeviceCall& call, const AddedRows& given, const PreparedTables& tables) {
  const int64_t n = given.new_ids.numel();
  std::vector<Write> writes;
  const int64_t* const ids = const_data<int64_t>(given.new_ids);
  auto* const rows = mutable_data<int64_t>(given.new_rows);
  std::vector<int64_t> capacities;
  for (size_t t = 0; t < tables.count(); ++t) capacities.push_back(capacity_of(tables, t));
  SentLists sent(call, bytes_of(given.offsets) + bytes_of(given.first_rows) + bytes_of(given.reused_offsets) +
                           bytes_of(capacities));
  const NumberNewRows number{sent.add(given.offsets),
                             sent.add(given.first_rows),
                             sent.add(given.reused_offsets),
                             const_data<int64_t>(given.reused),
                             sent.add(capacities),
                             static_cast<int64_t>(tables.count()),
                             rows};
  sent.send();
  auto* const first_bad = call.zeros<int64_t>(1);
  writes.push_back([&call, n, number, rows, first_bad] {
    simt::launch(call.stream(), n, number);
    simt::launch(call.stream(), n, CheckRows{rows, n, first_bad});
  });
  if (has_rows(tables)) init_rows(call, writes, given, tables, ids, given.initial_rows());
  if (has_any_scores(tables)) {
    const ScoredBatch batch{rows, send_scores(call, tables, given.offsets.data(), given.steps.data()),
                            call.errors(raise_new_row_error)};
    const WriteFirstScores first{batch, given.first_counts(), first_bad};
    writes.push_back([&call, n, first] { simt::launch(call.stream(), n, first); });
  }
  const TableMaps maps = send_maps(call, tables.maps, given.offsets.data());
  writes.push_back([=, &call, &given] {
    insert_ids(call, maps, ids, rows, n, first_bad, raise_added_id_error);
    if (given.rows) simt::launch(call.stream(), given.rows->numel(), given.fill_new(rows));
  });
  return [writes] {
    for (const Write& write : writes) write();
  };
}

Write prepare(DeviceCall& call, const RemovedRows& given, const PreparedTables& tables) {
  const int64_t n = given.ids.numel();
  const int64_t* const offsets = given.offsets.data();
  auto* const bad = call.zeros<int64_t>(1);
  const bool is_scored = has_any_scores(tables);
  ScoredBatch batch{const_data<int64_t>(given.rows), {nullptr, 0}, call.errors(raise_removed_row_error)};
  if (is_scored) batch.tables = send_scores(call, tables, offsets, nullptr);
  const LeavingIds leaving =
      leaving_ids(call, send_maps(call, tables.maps, offsets), const_data<int64_t>(given.ids), n);
  auto* const held = call.allocate_for<int64_t>(n);
  return [=, &call] {
    if (is_scored) simt::launch(call.stream(), n, CheckRemovedRows{batch, bad});
    erase_ids(call, leaving, held, bad);
    if (is_scored) simt::launch(call.stream(), n, ForgetScores{batch, bad});
  };
}

static void commit_step_(const CommitStepCall& given) {
  given.check();
  DeviceCall call(given.rows.seen.rows);
  std::vector<Write> writes;
  const auto prepare_part = [&](const auto& part, const PreparedTables& tables) {
    if (part.like().numel() > 0) writes.push_back(prepare(call, part, tables));
  };
  const auto prepare_all = [&](const StepOfRows& step, const PreparedTables& tables) {
    prepare_part(step.seen, tables);
    prepare_part(step.removed, tables);
    prepare_part(step.added, tables);
  };
  if (given.counters) prepare_all(given.waiting, *given.counters);
  prepare_all(given.rows, *given.tables);
  for (const Write& write : writes) write();
  call.finish();
}

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("add_rows_", &write_part_on_device<AddedRows>));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("remove_rows_", &write_part_on_device<RemovedRows>));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("commit_step_", &commit_step_));
}

}  // namespace torchrec_dyn
