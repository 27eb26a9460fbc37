// simt.h's sort_pairs for CUDA, by CUB: apart from the other algorithms, since it takes the longest to compile.
#include <cub/device/device_radix_sort.cuh>

#include "simt_cuda.h"

namespace torchrec_dyn::simt {

template <typename Key, typename Value>
PairsOf<Key, Value> sort_pairs(const Stream& stream, PairsOf<Key, Value> pairs, int64_t n, int first_bit, int end_bit) {
  static_assert(sizeof(Key) % alignof(Value) == 0);
  if (n == 0 || end_bit == first_bit) return pairs;
  constexpr int64_t kPair = sizeof(Key) + sizeof(Value);
  auto* other = static_cast<Key*>(stream.workspace->allocate(n * kPair));
  cub::DoubleBuffer<Key> keys(pairs.keys, other);
  cub::DoubleBuffer<Value> values(pairs.values, reinterpret_cast<Value*>(other + n));
  const auto sort = [&](void* memory, size_t& bytes) {
    check_cuda(cub::DeviceRadixSort::SortPairs<Key, Value, int64_t>(memory, bytes, keys, values, n, first_bit, end_bit,
                                                                    cuda_stream(stream)),
               "a sort");
  };
  size_t bytes = 0;
  sort(nullptr, bytes);
  sort(stream.workspace->allocate(static_cast<int64_t>(bytes)), bytes);
  return {keys.Current(), values.Current()};
}

template PairsOf<uint64_t, int64_t> sort_pairs(const Stream&, PairsOf<uint64_t, int64_t>, int64_t, int, int);
template PairsOf<uint32_t, uint32_t> sort_pairs(const Stream&, PairsOf<uint32_t, uint32_t>, int64_t, int, int);

}  // namespace torchrec_dyn::simt
