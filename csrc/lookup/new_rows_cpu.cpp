// The rows of new ids on the CPU: their numbers, their initial numbers and states, of all tables in one call.
#include "kernel.h"
#include "lookup/new_rows_arguments.h"
#include "storage/initial_writes_cpu.h"

namespace torchrec_dyn {
namespace {

void init_new_rows_(const Tensor& new_rows, const Tensor& new_ids, const Tensor& new_offsets, const Tensor& first_rows,
                    const Tensor& reused, const Tensor& reused_offsets, const Tensor& handle) {
  const NewIdsOfTables given = read_new_ids(new_rows, new_ids, new_offsets, first_rows, reused, reused_offsets, handle);
  const PreparedTables& tables = *given.tables;
  const RuleFacts facts = rule_facts(tables.optimizer);
  const int64_t* const id = const_data<int64_t>(new_ids);
  const int64_t* const again = const_data<int64_t>(reused);
  int64_t* const row = mutable_data<int64_t>(new_rows);
  for (size_t t = 0; t < tables.count(); ++t)
    for (int64_t i = given.reused_offsets[t]; i < given.reused_offsets[t + 1]; ++i)
      check_row("init_new_rows_", again[i], 0, tables.layout[t].capacity());
  for (size_t t = 0; t < tables.count(); ++t) {
    int64_t* next = row + given.offsets[t];
    for (int64_t i = given.reused_offsets[t]; i < given.reused_offsets[t + 1]; ++i) *next++ = again[i];
    for (int64_t fresh = given.first_rows[t]; next < row + given.offsets[t + 1]; ++fresh) *next++ = fresh;
  }
  dispatch_row_type("init_new_rows_", tables.row_type, [&](auto zero) {
    for (size_t t = 0; t < tables.count(); ++t) {
      const int64_t begin = given.offsets[t], count = given.count(t);
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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) { m.impl(TORCHREC_DYN_KERNEL("init_new_rows_", &init_new_rows_)); }

}  // namespace torchrec_dyn
