// Gather and pool on a device, and the gradient of the bag weights: pooling_cpu.cpp for CUDA.
#include <algorithm>
#include <bit>
#include <optional>

#include "device_call.h"
#include "kernel.h"
#include "lookup/find_and_pool_arguments.h"
#include "lookup/pool_into_kernels.h"
#include "lookup/pooling_cuda.h"
#include "lookup/pooling_kernels.h"
#include "sent_lists.h"

namespace torchrec_dyn {
namespace {

// The segments that have bags, for kernels, but with lists of blocks on the host. `memory`: of the outputs, whose
// elements have `element_bytes`.
template <typename T>
std::vector<DeviceSegment<T>> segments_of(const BagLists& lists, const std::vector<RowBlocks<T>>& tables,
                                          const std::vector<TableLayout>& layout, const void* memory,
                                          uintptr_t element_bytes) {
  std::vector<uintptr_t> row_bits;  // of a table the addresses of its rows together, to see of what they are multiples
  for (size_t t = 0; t < tables.size(); ++t) {
    row_bits.push_back(static_cast<uintptr_t>(tables[t].columns) * sizeof(T));
    for (int64_t b = 0; b < layout[t].blocks; ++b) row_bits[t] |= reinterpret_cast<uintptr_t>(tables[t].blocks[b]);
  }
  std::vector<DeviceSegment<T>> all;
  int64_t threads = 0;
  for (const Segment& segment : lists.segments) {
    if (segment.bags == 0) continue;
    const auto table = static_cast<size_t>(segment.table);
    const uintptr_t unit_bytes = row_bits[table] % 16 == 0 ? 16 : row_bits[table] % 4 == 0 ? 4 : 2;
    const uintptr_t columns = unit_bytes / sizeof(T);
    const auto place = static_cast<uintptr_t>(segment.out_offset) | static_cast<uintptr_t>(segment.out_stride);
    const uintptr_t bits = reinterpret_cast<uintptr_t>(memory) | place * element_bytes;
    const Division units(tables[table].columns / static_cast<int64_t>(columns));
    const auto count = static_cast<uint64_t>(units.divisor);
    const int shift = std::has_single_bit(count) ? std::countr_zero(count) : -1;
    all.push_back({tables[table], segment.first_bag, threads, segment.out_offset, segment.out_stride, units, shift,
                   static_cast<int>(columns), bits % std::min<uintptr_t>(16, columns * element_bytes) == 0,
                   one_block(tables[table], layout[table].blocks)});
    threads += segment.bags * units.divisor;
  }
  return all;
}

// Calls launch(bags, threads of units, whether each table is one block, initial rows) and reports what the kernels find
// wrong. They write an output only, which means nothing after an error.
template <typename T, typename Launch>
void run(DeviceCall& call, const BagArguments& given, const void* outputs, uintptr_t element_bytes,
         const Launch& launch) {
  const std::vector<T*>& pointers = given.tables.blocks<T>();
  const BagLists& lists = given.lists;
  if (lists.count == 0 && lists.offsets == nullptr) return;
  std::vector<DeviceSegment<T>> segments =
      segments_of(lists, given.tables.all_rows<T>(), given.tables.layout, outputs, element_bytes);
  const std::vector<WrongBags> wrong(1);
  std::vector<InitialTable> initial;
  for (const Segment& segment : lists.segments)
    if (given.initial_ids != nullptr && segment.bags > 0)
      initial.push_back(given.tables.initial[static_cast<size_t>(segment.table)]);
  SentLists sent(call, bytes_of(segments) + bytes_of(wrong) + bytes_of(pointers) + bytes_of(initial));
  T* const* device_blocks = sent.add(pointers);
  for (DeviceSegment<T>& segment : segments)
    segment.table.blocks = device_blocks + (segment.table.blocks - pointers.data());
  const DeviceBags<T> bags{sent.add(segments),
                           static_cast<int>(segments.size()),
                           lists.offsets,
                           lists.count,
                           const_data<int64_t>(given.rows),
                           given.rows.numel(),
                           given.mean,
                           sent.add(wrong)};
  const ShownRows shown{given.initial_ids, sent.add(initial)};
  sent.send();
  if (lists.count > 0) {
    const DeviceSegment<T>& last = segments.back();
    const bool is_plain =
        std::ranges::all_of(segments, [](const DeviceSegment<T>& segment) { return segment.block.memory != nullptr; });
    launch(bags, last.first_thread + (lists.count - last.first_bag) * last.units.divisor, is_plain, shown);
  }
  simt::launch(call.stream(), 1, ReportWrongBags<T>{bags, given.op, call.errors(raise_wrong_bags), given.is_checked});
  call.finish();
}

}  // namespace

void pool(DeviceCall& call, const BagArguments& given, const float* bag_weights, const int64_t* new_index,
          const Tensor& out) {
  dispatch_row_type(given.op, given.tables.row_type, [&](auto row_zero) {
    using T = decltype(row_zero);
    dispatch_row_type(given.op, out.scalar_type(), [&](auto out_zero) {
      using Out = decltype(out_zero);
      auto* place = mutable_data<Out>(out);
      run<T>(call, given, place, sizeof(Out),
             [&](const DeviceBags<T>& bags, int64_t threads, bool is_plain, const ShownRows& shown) {
               const PoolBags<T, Out, false> any{bags, bag_weights, place};
               if (shown.ids != nullptr)
                 simt::launch(call.stream(), threads, PoolShownBags<T, Out>{any, new_index, shown});
               else if (new_index != nullptr)
                 simt::launch(call.stream(), threads, PoolNewBags<T, Out>{any, new_index});
               else if (is_plain && bag_weights == nullptr)
                 simt::launch(call.stream(), threads, PoolBags<T, Out, true>{bags, nullptr, place});
               else
                 simt::launch(call.stream(), threads, any);
             });
    });
  });
}

namespace {

BagArguments read_bags_on_device(const char* op, const PreparedTables& tables, const Tensor& rows,
                                 const std::optional<Tensor>& offsets, const Tensor& segments, bool mean,
                                 int64_t elements) {
  BagArguments given{op, tables, rows, bags_of_offsets(op, offsets, rows.numel(), rows.device()), mean};
  read_segments(op, given.lists, segments, tables.layout, elements);
  return given;
}

Tensor gather_pool(const Tensor& rows, const std::optional<Tensor>& offsets, const std::optional<Tensor>& bag_weights,
                   std::vector<Tensor> weights, const Tensor& layout, const Tensor& segments, bool mean,
                   int64_t elements, ScalarType dtype) {
  check_tensor("gather_pool", "rows", rows, ScalarType::Long, kDevice);
  TORCHREC_DYN_CHECK(elements >= 0, "gather_pool: expected elements >= 0, got ", elements, ".");
  const PreparedTables tables = rows_of("gather_pool", weights, layout, rows.device());
  const BagArguments given = read_bags_on_device("gather_pool", tables, rows, offsets, segments, mean, elements);
  const float* weight = bag_weight_data("gather_pool", bag_weights, rows.numel(), rows.device());
  check_pooled_type("gather_pool", dtype);
  DeviceCall call(rows);
  Tensor out = new_device_tensor({elements}, dtype);
  pool(call, given, weight, nullptr, out);
  return out;
}

void pool_prepared_(Tensor out, const std::optional<Tensor>& new_index, const Tensor& rows,
                    const std::optional<Tensor>& initial_ids, const std::optional<Tensor>& offsets,
                    const std::optional<Tensor>& bag_weights, const Tensor& segments, const Tensor& handle, bool mean) {
  const char* op = "pool_prepared_";
  const Handles::Shared tables = Handles::all().get(op, handle);
  check_tensor(op, "rows", rows, ScalarType::Long, tables->device);
  const int64_t* fresh = check_pooled_into(op, *tables, out, new_index, rows, initial_ids, offsets, bag_weights);
  BagArguments given = read_bags_on_device(op, *tables, rows, offsets, segments, mean, out.numel());
  given.is_checked = true;
  given.initial_ids = initial_id_data(op, *tables, initial_ids, rows.numel());
  const float* weight = bag_weight_data(op, bag_weights, rows.numel(), rows.device());
  DeviceCall call(rows);
  if (new_index.has_value() && rows.numel() == 0) return;  // `fresh` may be null
  pool(call, given, weight, fresh, out);
}

Tensor weights_grad_prepared(const Tensor& grad, const Tensor& rows, const std::optional<Tensor>& initial_ids,
                             const std::optional<Tensor>& offsets, const Tensor& segments, const Tensor& handle,
                             bool mean) {
  const char* op = "weights_grad_prepared";
  const Handles::Shared tables = Handles::all().get(op, handle);
  check_tensor(op, "grad", grad, ScalarType::Float, tables->device);
  check_tensor(op, "rows", rows, ScalarType::Long, tables->device);
  BagArguments given = read_bags_on_device(op, *tables, rows, offsets, segments, mean, grad.numel());
  given.initial_ids = initial_id_data(op, *tables, initial_ids, rows.numel());
  DeviceCall call(rows);
  Tensor out = new_device_tensor({rows.numel()}, ScalarType::Float);
  auto* place = mutable_data<float>(out);
  const auto* bag_grad = const_data<float>(grad);
  if (given.lists.count == 0) simt::fill_zero(call.stream(), place, rows.numel() * static_cast<int64_t>(sizeof(float)));
  dispatch_row_type(op, tables->row_type, [&](auto zero) {
    using T = decltype(zero);
    run<T>(call, given, bag_grad, sizeof(float), [&](const DeviceBags<T>& bags, int64_t, bool, const ShownRows& shown) {
      simt::launch(call.stream(), std::max(bags.ids, bags.count), DotRows<T>{bags, bag_grad, place});
      if (shown.ids != nullptr) simt::launch(call.stream(), bags.ids, DotShownRows<T>{bags, bag_grad, place, shown});
    });
  });
  return out;
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_KERNEL("gather_pool", &gather_pool));
  m.impl(TORCHREC_DYN_KERNEL("pool_prepared_", &pool_prepared_));
  m.impl(TORCHREC_DYN_KERNEL("weights_grad_prepared", &weights_grad_prepared));
}

}  // namespace torchrec_dyn
