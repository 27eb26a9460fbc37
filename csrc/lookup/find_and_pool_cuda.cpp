// A forward of prepared tables on a device: find_and_pool_cpu.cpp for CUDA.
//
// The host waits once, for the numbers of the batch; the batch is pooled meanwhile, with zeros for absent ids. It waits
// again for the number of new ids that nobody expected.
#include <algorithm>
#include <optional>
#include <vector>

#include "bag_lengths_kernels.h"
#include "device_call.h"
#include "lookup/find_and_pool_arguments.h"
#include "lookup/pooling_cuda.h"
#include "sent_lists.h"
#include "storage/collect_new_cuda.h"
#include "storage/id_map_kernels.h"

namespace torchrec_dyn {
namespace {

Integers integers_of(const std::optional<Tensor>& numbers) {
  if (!numbers) return {};
  return {numbers->const_data_ptr(), numbers->scalar_type() == ScalarType::Int};
}

// Writes where bags begin, and a 1 unless they are right, and lengths and offsets agree if both are given.
void write_offsets(const simt::Stream& stream, const FindAndPoolCall& given, int64_t bags, int64_t* written,
                   int64_t* is_wrong) {
  const Integers lengths = integers_of(given.lengths);
  if (given.offsets)
    return simt::launch(stream, bags + 1, CopyOffsets{integers_of(given.offsets), lengths, written, is_wrong});
  simt::launch(stream, bags + 1, ReadLengths{lengths, bags, given.ids.numel(), written, is_wrong});
  simt::exclusive_sum(stream, written, bags + 1);
}

// Raises the error that an earlier call has left, which the sign of a count marks; takes the mark off.
void raise_earlier_error(int64_t& absent) {
  if (absent >= 0) return;
  absent -= kErrorMark;
  int64_t record[kErrorWords];
  simt::take_error(record);
  raise_device_error(record);  // nothing, if another thread has raised it
}

FindAndPoolResult find_and_pool(const FindAndPoolCall& given) {
  const char* op = "find_and_pool";
  const FoundBatch batch = read_batch(op, given);
  const PreparedTables& tables = *batch.tables;
  const auto count = static_cast<int64_t>(tables.count());
  const int64_t features = batch.features, n = given.ids.numel();
  Tensor numbers = new_int64(BatchNumbers::count(features, count));
  DeviceCall call(given.ids);
  Tensor bag_offsets = new_device_tensor({batch.bags + 1});
  Tensor rows = new_device_tensor({n});
  Tensor out = batch.columns > 0 ? new_device_tensor({batch.output_rows, batch.columns}, given.dtype)
                                 : new_device_tensor({batch.output_rows}, given.dtype);
  auto* const offset = mutable_data<int64_t>(bag_offsets);
  const int64_t count_read = numbers.numel() + 1;
  auto* const words = call.zeros<int64_t>(count_read);
  const BatchNumbers own(words, features, count);
  std::vector<TableMap> maps;
  for (const IdMapView& map : tables.maps) maps.push_back({map, 0});
  const std::vector<int64_t> firsts(batch.first_bags, batch.first_bags + features + 1);
  const std::vector<int64_t> places(batch.first_features, batch.first_features + count + 1);
  SentLists sent(call, bytes_of(maps) + bytes_of(firsts) + bytes_of(places) + bytes_of(tables.frozen));
  const TableMap* const device_maps = sent.add(maps);
  const int64_t* const device_firsts = sent.add(firsts);
  const int64_t* const device_places = sent.add(places);
  const int64_t* const frozen = tables.frozen.empty() ? nullptr : sent.add(tables.frozen);
  sent.send();
  write_offsets(call.stream(), given, batch.bags, offset, own.is_wrong);
  simt::launch(call.stream(), std::max(features, count) + 1,
               ReadBegins{offset, device_firsts, device_places, features, count, batch.bags, n, own.begins,
                          own.table_offsets, own.is_wrong});
  const int64_t* const id = const_data<int64_t>(given.ids);
  auto* const row = mutable_data<int64_t>(rows);
  simt::launch(call.stream(), n,
               FindRows{id, {device_maps, count}, own.table_offsets, row, own.absent, simt::error_record()});
  const auto search = [&] {
    return NewIdsSearch(call, {id, row, own.table_offsets, frozen, own.is_wrong, count, n}, own.new_offsets);
  };
  std::optional<NewIdsSearch> searched;
  if (batch.collects == Collects::kExpected) searched = search();
  simt::HostCopy copy(call.stream(), words, count_read);
  PooledBags bags{op, tables, rows, given.mean};
  bags.bag_weights = batch.bag_weights;
  bags.is_checked = true;
  const bool is_pooled = batch.pools != Pools::kNothing;
  if (given.segments && is_pooled) {
    bags.lists.offsets = offset;
    bags.lists.count = batch.bags;
    read_segments(op, bags.lists, *given.segments, tables.layout, batch.elements());
    pool(call, bags, out);
  }
  const int64_t* const copied = copy.wait();
  auto* const number = mutable_data<int64_t>(numbers);
  std::copy_n(copied, numbers.numel(), number);
  const BatchNumbers read(number, features, count);
  if (n > 0) raise_earlier_error(*read.absent);
  Tensor none = new_device_tensor({0});
  if (copied[numbers.numel()] != 0) return {out, rows, bag_offsets, new_int64(0), none, none, none};
  if (!given.segments && is_pooled) {
    bags.lists.count = n;
    add_segments(bags.lists, sequence_segments(tables, read.table_offsets));
    pool(call, bags, out);
  }
  CollectedIds found{none, none, none};
  if (batch.collects != Collects::kNever && tables.has_new(read.absent)) {
    if (!searched) {
      searched = search();
      constexpr auto kWord = static_cast<int64_t>(sizeof(int64_t));
      simt::copy_to_host(call.stream(), read.new_offsets, own.new_offsets, (count + 1) * kWord);
    }
    found = searched->list(call, read.new_offsets[count]);
  }
  return {out, rows, bag_offsets, numbers, found.ids, found.counts, found.index};
}

Tensor prepare_tables(const PrepareTablesCall& given) {
  return given.prepare(given.slots.empty() ? Device(kDevice) : given.slots.front().device());
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("prepare_tables", &prepare_tables));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("find_and_pool", &find_and_pool));
}

}  // namespace torchrec_dyn
