// A forward of prepared tables on the CPU: where bags begin, the rows of ids, and their pooling, in one call.
#include <algorithm>
#include <limits>

#include "lookup/find_and_pool_arguments.h"
#include "lookup/pooling_cpu.h"
#include "output_memory.h"
#include "parallel.h"
#include "storage/collect_new_cpu.h"
#include "storage/find_rows_cpu.h"

namespace torchrec_dyn {
namespace {

// Writes the sums of lengths. Returns false unless they are not negative and add up to the ids.
template <typename Length>
bool add_up(const Length* lengths, int64_t bags, int64_t ids, int64_t* offsets) {
  int64_t signs = 0;  // without comparisons, for which not every level of x86-64 has vectors
  for (int64_t b = 0; b < bags; ++b) {
    const int64_t length = lengths[b];
    signs |= length | static_cast<int64_t>(static_cast<uint64_t>(ids) - static_cast<uint64_t>(length));
  }
  if (signs < 0) return false;
  uint64_t sum = 0;
  for (int64_t b = 0; b < bags; ++b) {
    offsets[b] = static_cast<int64_t>(sum);
    sum += static_cast<uint64_t>(lengths[b]);
  }
  offsets[bags] = static_cast<int64_t>(sum);
  // No length is above the ids: only in a batch that no memory holds do their sums come round.
  const bool may_come_round = ids > 0 && bags > std::numeric_limits<int64_t>::max() / ids;
  return offsets[bags] == ids && !(may_come_round && !std::is_sorted(offsets, offsets + bags + 1));
}

bool add_up(const Tensor& lengths, int64_t ids, int64_t* offsets) {
  if (lengths.scalar_type() == ScalarType::Int)
    return add_up(const_data<int32_t>(lengths), lengths.numel(), ids, offsets);
  return add_up(const_data<int64_t>(lengths), lengths.numel(), ids, offsets);
}

// True if offsets ascend from 0 to the number of ids; copies them.
template <typename Offset>
bool ascend(const Offset* given, int64_t bags, int64_t ids, int64_t* offsets) {
  bool is_right = given[0] == 0 && given[bags] == ids;
  for (int64_t b = 0; b < bags; ++b) is_right &= given[b] <= given[b + 1];
  std::copy(given, given + bags + 1, offsets);
  return is_right;
}

bool ascend(const Tensor& given, int64_t ids, int64_t* offsets) {
  const int64_t bags = given.numel() - 1;
  if (given.scalar_type() == ScalarType::Int) return ascend(const_data<int32_t>(given), bags, ids, offsets);
  return ascend(const_data<int64_t>(given), bags, ids, offsets);
}

// Writes where bags begin. Returns false unless they are right, and lengths and offsets agree if both are given.
bool write_offsets(const FindAndPoolCall& call, int64_t bags, int64_t* written) {
  const int64_t ids = call.ids.numel();
  if (!call.lengths) return ascend(*call.offsets, ids, written);
  if (!add_up(*call.lengths, ids, written)) return false;
  if (!call.offsets) return true;
  if (call.offsets->scalar_type() == ScalarType::Int)
    return std::equal(written, written + bags + 1, const_data<int32_t>(*call.offsets));
  return std::equal(written, written + bags + 1, const_data<int64_t>(*call.offsets));
}

FindAndPoolResult find_and_pool(const FindAndPoolCall& call) {
  const char* op = "find_and_pool";
  const FoundBatch batch = read_batch(op, call);
  const PreparedTables& tables = *batch.tables;
  const auto count = static_cast<int64_t>(tables.count());
  const int64_t ids = call.ids.numel();
  Tensor bag_offsets = new_int64(batch.bags + 1);
  Tensor rows = new_int64(ids);
  Tensor numbers = new_int64(BatchNumbers::count(batch.features, count));
  Tensor out = batch.columns > 0 ? new_output(batch.output_rows, call.dtype, batch.columns)
                                 : new_output(batch.output_rows, call.dtype);
  Tensor none = new_int64(0);
  CollectedIds found{none, none, none, {}};
  int64_t* const number = mutable_data<int64_t>(numbers);
  int64_t* const offset = mutable_data<int64_t>(bag_offsets);
  int64_t* const row = mutable_data<int64_t>(rows);
  std::fill(number, number + numbers.numel(), int64_t{0});
  const BatchNumbers own(number, batch.features, count);
  const auto result = [&] {
    return FindAndPoolResult{out, rows, bag_offsets, numbers, found.ids, found.counts, found.index};
  };
  if (!write_offsets(call, batch.bags, offset)) {
    std::fill(row, row + rows.numel(), kNoRow);
    return {out, rows, bag_offsets, none, none, none, none};
  }
  for (int64_t f = 0; f <= batch.features; ++f) own.begins[f] = offset[batch.first_bags[f]];
  for (int64_t t = 0; t <= count; ++t) own.table_offsets[t] = own.begins[batch.first_features[t]];
  find_rows(tables.maps, const_data<int64_t>(call.ids), own.table_offsets, row, own.absent);
  const bool has_absent = std::any_of(own.absent, own.absent + count, [](int64_t absent) { return absent > 0; });
  if (batch.collects != Collects::kNever && tables.has_new(own.absent)) {
    const int64_t* const frozen = tables.frozen.empty() ? nullptr : tables.frozen.data();
    found = collect_new(const_data<int64_t>(call.ids), row, own.table_offsets, count, frozen);
    std::copy(found.offsets.begin(), found.offsets.end(), own.new_offsets);
  }
  if (batch.pools == Pools::kNothing || (batch.pools == Pools::kKnown && has_absent)) return result();
  PooledBags bags{op, tables, rows, call.mean};
  BagLists& lists = bags.lists;
  lists.count = call.segments ? batch.bags : ids;
  if (call.segments) {
    // Bags of one id each are a sequence: the loops over them read no offsets.
    if (batch.bags != ids || !counts_up(offset, batch.bags + 1)) lists.offsets = offset;
    read_segments(op, lists, *call.segments, tables.layout, batch.elements());
  } else {
    add_segments(lists, sequence_segments(tables, own.table_offsets));
  }
  bags.bag_weights = batch.bag_weights;
  pool(bags, out);
  return result();
}

Tensor prepare_tables(const PrepareTablesCall& call) { return call.prepare(DeviceType::CPU); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(torchrec_dyn, CPU, m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("prepare_tables", &prepare_tables));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("find_and_pool", &find_and_pool));
}

}  // namespace torchrec_dyn
