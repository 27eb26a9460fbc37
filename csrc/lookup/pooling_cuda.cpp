// Gather and pool on a device, and the gradient of the bag weights: pooling_cpu.cpp for CUDA.
#include <algorithm>
#include <bit>

#include "device_call.h"
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
void run(DeviceCall& call, const PooledBags& given, const void* outputs, uintptr_t element_bytes,
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

void pool(DeviceCall& call, const PooledBags& given, const Tensor& out) {
  dispatch_row_type(given.op, given.tables.row_type, [&](auto row_zero) {
    using T = decltype(row_zero);
    dispatch_row_type(given.op, out.scalar_type(), [&](auto out_zero) {
      using Out = decltype(out_zero);
      auto* place = mutable_data<Out>(out);
      run<T>(call, given, place, sizeof(Out),
             [&](const DeviceBags<T>& bags, int64_t threads, bool is_plain, const ShownRows& shown) {
               const PoolBags<T, Out, false> any{bags, given.bag_weights, place};
               if (shown.ids != nullptr)
                 simt::launch(call.stream(), threads, PoolShownBags<T, Out>{any, given.new_index, shown});
               else if (given.new_index != nullptr)
                 simt::launch(call.stream(), threads, PoolNewBags<T, Out>{any, given.new_index});
               else if (is_plain && given.bag_weights == nullptr)
                 simt::launch(call.stream(), threads, PoolBags<T, Out, true>{bags, nullptr, place});
               else
                 simt::launch(call.stream(), threads, any);
             });
    });
  });
}

namespace {

Tensor gather_pool(const GatherPoolCall& given) {
  const PreparedTables tables = given.tables(kDevice);
  const PooledBags bags = given.bags(tables, false);
  DeviceCall call(given.rows);
  Tensor out = new_device_tensor({given.elements}, given.dtype);
  pool(call, bags, out);
  return out;
}

void pool_prepared_(const PoolPreparedCall& given) {
  const PooledBags bags = given.bags(false);
  DeviceCall call(given.rows);
  if (given.new_index.has_value() && given.rows.numel() == 0) return;  // bags.new_index may be null
  pool(call, bags, given.out);
}

Tensor weights_grad_prepared(const WeightsGradCall& given) {
  const PooledBags all = given.bags(false);
  const int64_t ids = given.rows.numel();
  DeviceCall call(given.rows);
  Tensor out = new_device_tensor({ids}, ScalarType::Float);
  auto* place = mutable_data<float>(out);
  const auto* bag_grad = const_data<float>(given.grad);
  if (all.lists.count == 0) simt::fill_zero(call.stream(), place, ids * static_cast<int64_t>(sizeof(float)));
  dispatch_row_type(all.op, given.tables->row_type, [&](auto zero) {
    using T = decltype(zero);
    run<T>(call, all, bag_grad, sizeof(float), [&](const DeviceBags<T>& bags, int64_t, bool, const ShownRows& shown) {
      simt::launch(call.stream(), std::max(bags.ids, bags.count), DotRows<T>{bags, bag_grad, place});
      if (shown.ids != nullptr) simt::launch(call.stream(), bags.ids, DotShownRows<T>{bags, bag_grad, place, shown});
    });
  });
  return out;
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("gather_pool", &gather_pool));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("pool_prepared_", &pool_prepared_));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("weights_grad_prepared", &weights_grad_prepared));
}

}  // namespace torchrec_dyn
