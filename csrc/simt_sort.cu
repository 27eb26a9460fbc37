// simt.h's sort_pairs for CUDA, by CUB: apart from the other algorithms, since it takes the longest to compile.
#include <cub/device/device_radix_sort.cuh>

#include "simt_cuda.h"

namespace torchrec_dyn::simt {

Pairs sort_pairs(const Queue& queue, Pairs pairs, int64_t n, int first_bit, int end_bit) {
  if (n == 0 || end_bit == first_bit) return pairs;
  constexpr int64_t kPair = sizeof(uint64_t) + sizeof(int64_t);
  auto* other = static_cast<uint64_t*>(queue.scratch->take(n * kPair));
  cub::DoubleBuffer<uint64_t> keys(pairs.keys, other);
  cub::DoubleBuffer<int64_t> values(pairs.values, reinterpret_cast<int64_t*>(other + n));
  const auto sort = [&](void* memory, size_t& bytes) {
    check_cuda(cub::DeviceRadixSort::SortPairs<uint64_t, int64_t, int64_t>(memory, bytes, keys, values, n, first_bit,
                                                                           end_bit, stream_of(queue)),
               "a sort");
  };
  size_t bytes = 0;
  sort(nullptr, bytes);
  sort(queue.scratch->take(static_cast<int64_t>(bytes)), bytes);
  return {keys.Current(), values.Current()};
}

}  // namespace torchrec_dyn::simt
