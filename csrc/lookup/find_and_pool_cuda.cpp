// A forward of prepared tables on a device: find_and_pool_cpu.cpp for CUDA.
//
// The host waits once, for the numbers of the batch; the batch is pooled meanwhile, with zeros for absent ids.
#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "device_call.h"
#include "kernel.h"
#include "lookup/find_and_pool_arguments.h"
#include "lookup/find_and_pool_kernels.h"
#include "lookup/pooling_cuda.h"
#include "sent_lists.h"
#include "storage/id_map_kernels.h"

namespace torchrec_dyn {
namespace {

// Calls body with the numbers, which are int32 or int64.
template <typename Body>
void with_integers(const Tensor& numbers, const Body& body) {
  if (numbers.scalar_type() == ScalarType::Int) return body(const_data<int32_t>(numbers));
  body(const_data<int64_t>(numbers));
}

// Writes where bags begin, and a 1 unless they are right, and lengths and offsets agree if both are given.
void write_offsets(const simt::Stream& stream, const std::optional<Tensor>& lengths,
                   const std::optional<Tensor>& offsets, int64_t bags, int64_t ids, int64_t* written,
                   int64_t* is_wrong) {
  if (!lengths)
    return with_integers(*offsets, [&](const auto* given) {
      simt::launch(stream, bags + 1, CopyOffsets{given, bags, written, is_wrong});
    });
  with_integers(*lengths, [&](const auto* given) {
    simt::launch(stream, bags + 1, ReadBagLengths{given, bags, ids, written, is_wrong});
  });
  simt::exclusive_sum(stream, written, bags + 1);
  if (!offsets) return;
  with_integers(*offsets,
                [&](const auto* given) { simt::launch(stream, bags + 1, CompareOffsets{given, written, is_wrong}); });
}

// Raises the error that an earlier call has left, which the sign of a count marks; takes the mark off.
void raise_earlier_error(int64_t& absent) {
  if (absent >= 0) return;
  absent -= kErrorMark;
  int64_t record[kErrorWords];
  simt::take_error(record);
  raise_device_error(record);  // nothing, if another thread has raised it
}

std::tuple<Tensor, Tensor, Tensor, Tensor> find_and_pool(const Tensor& ids, const std::optional<Tensor>& lengths,
                                                         const std::optional<Tensor>& offsets,
                                                         const std::optional<Tensor>& bag_weights,
                                                         const Tensor& first_bags, const Tensor& first_features,
                                                         const std::optional<Tensor>& segments, const Tensor& handle,
                                                         bool mean, int64_t pools, int64_t elements, ScalarType dtype) {
  const char* op = "find_and_pool";
  const FoundBatch batch = read_batch(op, ids, lengths, offsets, bag_weights, first_bags, first_features, segments,
                                      handle, pools, elements, dtype);
  const PreparedTables& tables = *batch.tables;
  const auto count = static_cast<int64_t>(tables.count());
  const int64_t features = batch.features, n = ids.numel();
  Tensor numbers = new_int64(features + 1 + count + 1);
  DeviceCall call(ids);
  Tensor bag_offsets = new_device_tensor({batch.bags + 1});
  Tensor rows = new_device_tensor({n});
  Tensor out = new_device_tensor({batch.elements}, dtype);
  auto* const offset = mutable_data<int64_t>(bag_offsets);
  auto* const words = call.zeros<int64_t>(numbers.numel());
  int64_t* const absent = words + features + 1;
  int64_t* const is_wrong = absent + count;
  std::vector<TableMap> maps;
  for (const IdMapView& map : tables.maps) maps.push_back({map, 0});
  const std::vector<int64_t> firsts(batch.first_bags, batch.first_bags + features + 1);
  const std::vector<int64_t> places(batch.first_features, batch.first_features + count + 1);
  SentLists sent(call, bytes_of(maps) + bytes_of(firsts) + bytes_of(places));
  const TableMap* const device_maps = sent.add(maps);
  const int64_t* const device_firsts = sent.add(firsts);
  const int64_t* const device_places = sent.add(places);
  sent.send();
  write_offsets(call.stream(), lengths, offsets, batch.bags, n, offset, is_wrong);
  simt::launch(call.stream(), features + 1, ReadBegins{offset, device_firsts, batch.bags, n, words, is_wrong});
  simt::launch(call.stream(), n,
               FindRows{const_data<int64_t>(ids),
                        {device_maps, count},
                        words,
                        device_places,
                        mutable_data<int64_t>(rows),
                        absent,
                        simt::error_record()});
  simt::HostCopy copy(call.stream(), words, numbers.numel());
  BagArguments bags{op, tables, rows, {}, mean, true};
  const bool is_pooled = batch.pools != Pools::kNothing;
  if (segments && is_pooled) {
    bags.lists.offsets = offset;
    bags.lists.count = batch.bags;
    read_segments(op, bags.lists, *segments, tables.layout, batch.elements);
    pool(call, bags, batch.bag_weights, nullptr, out);
  }
  auto* const number = mutable_data<int64_t>(numbers);
  std::copy_n(copy.wait(), numbers.numel(), number);
  if (n > 0) raise_earlier_error(number[features + 1]);
  if (!segments && is_pooled && number[numbers.numel() - 1] == 0) {
    bags.lists.count = n;
    add_segments(bags.lists, sequence_segments(tables, table_offsets_of(batch, number)));
    pool(call, bags, batch.bag_weights, nullptr, out);
  }
  return {out, rows, bag_offsets, numbers};
}

Tensor prepare_tables(std::vector<Tensor> slots, const Tensor& moved, std::vector<Tensor> weights,
                      std::vector<Tensor> states, const Tensor& layout, int64_t optimizer,
                      std::vector<int64_t> on_nonfinite, std::vector<Tensor> nonfinite,
                      const std::optional<Tensor>& initial, const std::optional<Tensor>& parameters,
                      std::vector<double> initial_states) {
  const Device device = slots.empty() ? Device(kDevice) : slots.front().device();
  return prepared(device, std::move(slots), moved, std::move(weights), std::move(states), layout, optimizer,
                  on_nonfinite, std::move(nonfinite), initial, parameters, initial_states);
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_KERNEL("prepare_tables", &prepare_tables));
  m.impl(TORCHREC_DYN_KERNEL("find_and_pool", &find_and_pool));
}

}  // namespace torchrec_dyn
