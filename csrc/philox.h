// Philox4x32-10: a counter-based generator. random(key, counter) is a pure function, so a number depends
// on nothing but what it is for: no state, no order, no thread.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the constants
// are those of the paper. tests/test_initializers.py checks the known-answer vectors of Random123.
#pragma once

#include <array>
#include <cstdint>

namespace torchrec_dyn {

using Philox4 = std::array<uint32_t, 4>;

inline Philox4 philox4x32(uint64_t key, Philox4 counter) {
  uint32_t key0 = static_cast<uint32_t>(key);
  uint32_t key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = 0xD2511F53ull * counter[0];
    const uint64_t product1 = 0xCD9E8D57ull * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(product0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// Four random words for block `block` of the row of `id`. `stream` separates uses of one key (a step).
inline Philox4 random_words(uint64_t key, int64_t id, uint32_t block, uint32_t stream) {
  const uint64_t word = static_cast<uint64_t>(id);
  return philox4x32(key, {static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32), block, stream});
}

}  // namespace torchrec_dyn
