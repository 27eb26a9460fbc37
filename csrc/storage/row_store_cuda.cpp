// Single rows on a device: row_store_cpu.cpp for CUDA.
#include <optional>

#include "device_call.h"
#include "kernel.h"
#include "process_hash.h"
#include "storage/row_store_arguments.h"
#include "storage/row_store_kernels.h"

namespace torchrec_dyn {
namespace {

// The blocks of one table, for the kernels of a call.
template <typename T>
struct DeviceRows {
  DeviceRows(const char* op, DeviceCall& call, const std::vector<Tensor>& blocks, int64_t shift, int64_t columns) {
    BlockList<T> list(op, "blocks", blocks, call.device());
    table = list.rows(layout_of_one(op, blocks, shift, columns), columns);
    table.blocks = call.copy_of(list.pointers());
    for (const T* pointer : list.pointers()) address_bits |= reinterpret_cast<uintptr_t>(pointer);
  }

  RowBlocks<T> table;
  uintptr_t address_bits = 0;  // of all blocks together, to see of what they are multiples
};

// The rows of a call, for kernels that look whether all are inside before they write.
GivenRows find_row_outside(const char* op, DeviceCall& call, const Tensor& rows, int64_t lowest, int64_t capacity) {
  const int64_t n = rows.numel();
  const GivenRows given{const_data<int64_t>(rows),   n, lowest, capacity, call.zeros<int64_t>(1), op,
                        call.errors(raise_row_error)};
  simt::launch(call.stream(), n, FindRowOutside{given});
  return given;
}

// Calls body(table) with the rows as the largest units in which they are copied from and to these addresses.
template <typename T, typename Body>
void dispatch_units(const DeviceRows<T>& rows, const void* memory, const Body& body) {
  const RowBlocks<T>& table = rows.table;
  const auto row_bytes = static_cast<uintptr_t>(table.columns) * sizeof(T);
  const uintptr_t bits = rows.address_bits | reinterpret_cast<uintptr_t>(memory) | row_bytes;
  const auto with = [&]<typename Unit>(Unit) {
    body(RowBlocks<Unit>{reinterpret_cast<Unit* const*>(table.blocks), table.shift,
                         static_cast<int64_t>(row_bytes / sizeof(Unit)), table.capacity});
  };
  if (bits % 16 == 0) return with(Unit16{});
  if (bits % 4 == 0) return with(uint32_t{});
  return with(uint16_t{});
}

void init_rows_(const Tensor& ids, const Tensor& rows, std::vector<Tensor> blocks, int64_t shift, int64_t columns,
                int64_t first_column, int64_t kind, std::vector<double> parameters, int64_t key) {
  check_tensor("init_rows_", "ids", ids, ScalarType::Long, kDevice);
  check_size("init_rows_", "the number of rows", ids.numel(), rows.numel());
  check_size("init_rows_", "the number of parameters", 6, static_cast<int64_t>(parameters.size()));
  const InitialRows initial = initial_rows_of("init_rows_", first_column, kind, parameters.data());
  dispatch_row_type("init_rows_", blocks, [&](auto zero) {
    using T = decltype(zero);
    DeviceCall call(ids);
    const DeviceRows<T> device_rows("init_rows_", call, blocks, shift, columns);
    check_tensor("init_rows_", "rows", rows, ScalarType::Long, ids.device());
    SeparateMemory().writes(blocks).reads(ids).reads(rows).check("init_rows_");
    const GivenRows given = find_row_outside("init_rows_", call, rows, 0, device_rows.table.capacity);
    const int64_t threads = (first_column + columns - 1) / kThreadColumns - first_column / kThreadColumns + 1;
    const bool is_whole = first_column % kThreadColumns == 0 && columns % kThreadColumns == 0 &&
                          device_rows.address_bits % (kThreadColumns * sizeof(T)) == 0;
    simt::launch(call.stream(), rows.numel() * threads,
                 InitRows<T>{const_data<int64_t>(ids), given, device_rows.table, initial, static_cast<uint64_t>(key),
                             first_column, Division(threads), is_whole});
    call.finish();
  });
}

Tensor gather_rows(const Tensor& rows, std::vector<Tensor> blocks, int64_t shift, int64_t columns, ScalarType dtype) {
  check_gathered_type(blocks, dtype);
  std::optional<Tensor> out;
  dispatch_row_type("gather_rows", dtype, [&](auto zero) {
    using T = decltype(zero);
    check_tensor("gather_rows", "rows", rows, ScalarType::Long, kDevice);
    DeviceCall call(rows);
    const DeviceRows<T> device_rows("gather_rows", call, blocks, shift, columns);
    const GivenRows given = find_row_outside("gather_rows", call, rows, -1, device_rows.table.capacity);
    out = new_device_tensor({rows.numel(), columns}, dtype);
    dispatch_units(device_rows, out->const_data_ptr(), [&]<typename Unit>(const RowBlocks<Unit>& table) {
      simt::launch(call.stream(), rows.numel() * table.columns,
                   GatherRows<Unit>{given, table, Division(table.columns), mutable_data<Unit>(*out)});
    });
    call.finish();
  });
  return *out;
}

void scatter_rows_(const Tensor& rows, const Tensor& values, std::vector<Tensor> blocks, int64_t shift,
                   int64_t columns) {
  check_scattered_size(rows, values, shift, columns);
  dispatch_row_type("scatter_rows_", blocks, [&](auto zero) {
    using T = decltype(zero);
    check_tensor("scatter_rows_", "values", values, kDtypeOf<T>, kDevice);
    DeviceCall call(values);
    const DeviceRows<T> device_rows("scatter_rows_", call, blocks, shift, columns);
    check_tensor("scatter_rows_", "rows", rows, ScalarType::Long, values.device());
    SeparateMemory().writes(blocks).reads(rows).reads(values).check("scatter_rows_");
    const GivenRows given = find_row_outside("scatter_rows_", call, rows, 0, device_rows.table.capacity);
    const int64_t n = rows.numel();
    const int64_t size = (2 * n + kLineSlots - 1) / kLineSlots * kLineSlots;
    auto* last = call.zeros<int64_t>(size);
    auto* places = call.allocate_for<int64_t>(n);
    simt::launch(call.stream(), n, FindLastPositions{process_hash(), const_data<int64_t>(rows), last, size, places});
    dispatch_units(device_rows, values.const_data_ptr(), [&]<typename Unit>(const RowBlocks<Unit>& table) {
      simt::launch(call.stream(), n * table.columns,
                   ScatterRows<Unit>{given, last, places, const_data<Unit>(values), table, Division(table.columns)});
    });
    call.finish();
  });
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_KERNEL("init_rows_", &init_rows_));
  m.impl(TORCHREC_DYN_KERNEL("gather_rows", &gather_rows));
  m.impl(TORCHREC_DYN_KERNEL("scatter_rows_", &scatter_rows_));
}

}  // namespace torchrec_dyn
