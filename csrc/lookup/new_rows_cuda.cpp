// The rows of new ids on a device: new_rows_cpu.cpp for CUDA.
#include <vector>

#include "device_call.h"
#include "kernel.h"
#include "lookup/new_rows_arguments.h"
#include "lookup/new_rows_kernels.h"
#include "sent_lists.h"
#include "storage/row_store_kernels.h"

namespace torchrec_dyn {
namespace {

// Writes the initial rows of one table; blocks of `rows` are on the device, those of `host` on the host.
template <typename T>
void write_rows(DeviceCall& call, const InitialTable& initial, const int64_t* ids, const int64_t* rows, int64_t count,
                const RowBlocks<T>& host, T* const* device, int64_t blocks) {
  const char* op = "init_new_rows_";
  uintptr_t bits = 0;
  for (int64_t b = 0; b < blocks; ++b) bits |= reinterpret_cast<uintptr_t>(host.blocks[b]);
  const GivenRows given{rows, count, 0, host.capacity, call.zeros<int64_t>(1), op, call.errors(raise_row_error)};
  simt::launch(call.stream(), count, FindRowOutside{given});
  RowBlocks<T> table = host;
  table.blocks = device;
  const int64_t first = initial.first_column, columns = table.columns;
  const int64_t threads = (first + columns - 1) / kThreadColumns - first / kThreadColumns + 1;
  const bool is_whole =
      first % kThreadColumns == 0 && columns % kThreadColumns == 0 && bits % (kThreadColumns * sizeof(T)) == 0;
  simt::launch(call.stream(), count * threads,
               InitRows<T>{ids, given, table, initial.rows, initial.key, first, Division(threads), is_whole});
}

void init_new_rows_(const Tensor& new_rows, const Tensor& new_ids, const Tensor& new_offsets, const Tensor& first_rows,
                    const Tensor& reused, const Tensor& reused_offsets, const Tensor& handle) {
  const NewIdsOfTables given = read_new_ids(new_rows, new_ids, new_offsets, first_rows, reused, reused_offsets, handle);
  const PreparedTables& tables = *given.tables;
  const RuleFacts facts = rule_facts(tables.optimizer);
  const auto count = static_cast<int64_t>(tables.count());
  if (new_ids.numel() == 0) return;
  DeviceCall call(new_ids);
  const std::vector<int64_t> offsets(given.offsets, given.offsets + count + 1);
  const std::vector<int64_t> firsts(given.first_rows, given.first_rows + count);
  const std::vector<int64_t> again(given.reused_offsets, given.reused_offsets + count + 1);
  dispatch_row_type("init_new_rows_", tables.row_type, [&](auto zero) {
    using T = decltype(zero);
    const std::vector<T*>& weights = tables.blocks<T>();
    SentLists sent(
        call, bytes_of(offsets) + bytes_of(firsts) + bytes_of(again) + bytes_of(weights) + bytes_of(tables.states));
    const NumberNewRows number{sent.add(offsets),
                               sent.add(firsts),
                               sent.add(again),
                               const_data<int64_t>(reused),
                               count,
                               mutable_data<int64_t>(new_rows)};
    T* const* const device_weights = sent.add(weights);
    float* const* const device_states = sent.add(tables.states);
    sent.send();
    simt::launch(call.stream(), new_ids.numel(), number);
    for (size_t t = 0; t < tables.count(); ++t) {
      const int64_t begin = given.offsets[t], n = given.count(t), first_block = tables.layout[t].first_block;
      if (n == 0) continue;
      const int64_t *ids = const_data<int64_t>(new_ids) + begin, *rows = const_data<int64_t>(new_rows) + begin;
      write_rows(call, tables.initial[t], ids, rows, n, tables.rows<T>(t), device_weights + first_block,
                 tables.layout[t].blocks);
      for (int s = 0; s < facts.state_count(); ++s) {
        InitialTable constant{};
        constant.rows.low = static_cast<double>(tables.initial_states[static_cast<size_t>(s)]);
        const RowBlocks<float> state = tables.state(t, s, facts.states[s]);
        write_rows(call, constant, ids, rows, n, state, device_states + (state.blocks - tables.states.data()),
                   tables.layout[t].blocks);
      }
    }
  });
  call.finish();
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) { m.impl(TORCHREC_DYN_KERNEL("init_new_rows_", &init_new_rows_)); }

}  // namespace torchrec_dyn
