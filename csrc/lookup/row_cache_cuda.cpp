// The rows of tables in host memory that a GPU's memory has, too. Without kernels for the CPU: its tables have no
// caches.
#include <cstdint>
#include <vector>

#include "device_call.h"
#include "lookup/row_cache_arguments.h"
#include "lookup/row_cache_kernels.h"
#include "sent_lists.h"

namespace torchrec_dyn {
namespace {

template <typename T>
ByteRows bytes_of_rows(const RowBlocks<T>& rows, int64_t blocks, T* const* sent) {
  const int64_t row_bytes = rows.columns * static_cast<int64_t>(sizeof(T));
  uintptr_t bits = static_cast<uintptr_t>(row_bytes);
  for (int64_t b = 0; b < blocks; ++b) bits |= reinterpret_cast<uintptr_t>(rows.blocks[b]);
  return {reinterpret_cast<char* const*>(sent), rows.shift, row_bytes, bits % kMostUnitBytes == 0};
}

// The weights and states of the tables with caches; notes in each cache which are its own.
std::vector<ByteRows> stores_of(const CacheRowsCall& given, std::vector<RowCache>& caches, float* const* states,
                                const void* weights) {
  const PreparedTables& tables = *given.tables;
  const RuleFacts facts = rule_facts(tables.optimizer);
  std::vector<ByteRows> stores;
  dispatch_row_type(given.kOp, tables.row_type, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t c = 0; c < given.batch.count(); ++c) {
      const auto t = static_cast<size_t>(given.batch.line(c)[0]);
      const int64_t blocks = tables.layout[t].blocks;
      RowCache& cache = caches[static_cast<size_t>(c)];
      cache.first_store = static_cast<int64_t>(stores.size());
      cache.stores = 1 + facts.state_count();
      stores.push_back(
          bytes_of_rows(tables.rows<T>(t), blocks, static_cast<T* const*>(weights) + tables.layout[t].first_block));
      for (int s = 0; s < facts.state_count(); ++s) {
        const RowBlocks<float> state = tables.state(t, s, facts.states[s]);
        stores.push_back(bytes_of_rows(state, blocks, states + (state.blocks - tables.states.data())));
      }
    }
  });
  return stores;
}

// The lists of pointers of the weights, whatever their type.
size_t bytes_of_weights(const PreparedTables& tables) {
  return std::visit([](const auto& blocks) { return bytes_of(blocks); }, tables.weights);
}
const void* add_weights(SentLists& sent, const PreparedTables& tables) {
  return std::visit([&](const auto& blocks) -> const void* { return sent.add(blocks); }, tables.weights);
}

void cache_rows_(const CacheRowsCall& given) {
  std::vector<RowCache> caches = given.read();
  const int64_t n = given.batch.rows.numel(), count = given.batch.count();
  if (n == 0 || count == 0) return;
  DeviceCall call(given.batch.rows);
  const simt::Stream& stream = call.stream();
  const PreparedTables& tables = *given.tables;
  auto* const plans = call.zeros<CachePlan>(count);
  for (int64_t c = 0; c < count; ++c) caches[static_cast<size_t>(c)].plan = plans + c;
  const auto most_stores = static_cast<size_t>(count * (1 + rule_facts(tables.optimizer).state_count()));
  SentLists sent(call, bytes_of_weights(tables) + bytes_of(tables.states) + bytes_of(caches) +
                           bytes_of(std::vector<ByteRows>(most_stores)));
  const void* const weights = add_weights(sent, tables);
  float* const* const states = sent.add(tables.states);
  const CachedStores stores{sent.add(stores_of(given, caches, states, weights))};
  const RowCaches all{sent.add(caches), count};
  sent.send();
  const int64_t frames = caches.back().first_frame + caches.back().frames;
  auto* const missing = call.allocate_for<int64_t>(n);
  auto* const assigned = call.allocate_for<int64_t>(n);
  auto* const counts = call.zeros<int64_t>(count * kAgeCopies * kAges);
  auto* const sums = call.allocate_for<int64_t>(count * kAges + 1);
  auto* const ties = call.zeros<int64_t>(count * kTies + 1);
  simt::launch(stream, n, FindMissing{all, const_data<int64_t>(given.batch.rows), missing});
  simt::launch(stream, count, PlanEvictions{all});
  simt::launch(stream, frames, CountAges{all, counts});
  simt::launch(stream, count * kAges + 1, AddAges{counts, sums, count});
  simt::exclusive_sum(stream, sums, count * kAges + 1);
  simt::launch(stream, count * kAges, ChooseAges{all, sums});
  simt::launch(stream, frames, CountTies{all, ties});
  simt::exclusive_sum(stream, ties, count * kTies + 1);
  simt::launch(stream, count * kTies, ChooseRows{all, ties});
  simt::launch_tiles(stream, frames, WriteBackRows{all, stores});
  simt::launch(stream, frames, FreeFrames{all});
  simt::launch(stream, n, AssignFrames{all, missing, assigned});
  if (given.loads) simt::launch_tiles(stream, n, LoadRows{all, stores, missing, assigned});
  simt::launch(stream, count, FinishPlans{all, given.loads});
  call.finish();
}

Tensor row_places(const RowPlacesCall& given) {
  const std::vector<RowCache> caches = given.batch.read(given.batch.rows.device());
  const int64_t n = given.batch.rows.numel();
  DeviceCall call(given.batch.rows);
  Tensor places = new_device_tensor({n});
  const RowCaches all{call.copy_of(caches), given.batch.count()};
  simt::launch(call.stream(), n,
               WritePlaces{all, const_data<int64_t>(given.batch.rows), mutable_data<int64_t>(places)});
  call.finish();
  return places;
}

}  // namespace

TORCHREC_DYN_DEVICE_KERNELS(m) {
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("cache_rows_", &cache_rows_));
  m.impl(TORCHREC_DYN_STRUCT_KERNEL("row_places", &row_places));
}

}  // namespace torchrec_dyn
