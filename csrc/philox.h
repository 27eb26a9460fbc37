// Philox4x32-10: a counter-based generator. random(key, counter) is a pure function, so a number depends on key and
// counter only, not on a state, the order of calls or the thread.
//
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the constants
// are those of the paper. tests/storage/test_initializers.py checks the known-answer vectors of Random123.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__) && !defined(__CUDACC__)
#include <immintrin.h>
#endif

#include "simd.h"

namespace torchrec_dyn {

struct Philox4 {
  uint32_t words[4];
};

TORCHREC_DYN_BOTH inline Philox4 philox4x32(uint64_t key, Philox4 counter) {
  uint32_t key0 = static_cast<uint32_t>(key);
  uint32_t key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = 0xD2511F53ull * counter.words[0];
    const uint64_t product1 = 0xCD9E8D57ull * counter.words[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter.words[1] ^ key0, static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter.words[3] ^ key1, static_cast<uint32_t>(product0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// Four random words for block `block` of the row of `id`. `stream` separates uses of one key.
TORCHREC_DYN_BOTH inline Philox4 random_words(uint64_t key, int64_t id, uint32_t block, uint32_t stream) {
  const uint64_t word = static_cast<uint64_t>(id);
  return philox4x32(key, {static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32), block, stream});
}

// The words of kBlocks neighbouring blocks, in their order: words[4 * kBlocks]. kBlocks is even.
#if defined(__SSE2__) && !defined(__CUDACC__)
// Two blocks share a register of 128 bits. `pmuludq`, the multiplication of Philox, exists on every x86-64, but
// compilers do not generate it from plain loops. Eight blocks side by side hide its latency, so wider registers gain
// little. Until the end, only the low half of each 64-bit lane is used.
template <int kBlocks>
TORCHREC_DYN_INLINE void random_blocks(uint64_t key, int64_t id, uint32_t first_block, uint32_t stream,
                                       uint32_t* words) {
  constexpr int kPairs = kBlocks / 2;
  const __m128i factor0 = _mm_set1_epi64x(0xD2511F53ll);
  const __m128i factor1 = _mm_set1_epi64x(0xCD9E8D57ll);
  __m128i counter0[kPairs], counter1[kPairs], counter2[kPairs], counter3[kPairs];
  for (int pair = 0; pair < kPairs; ++pair) {
    const auto block = static_cast<uint32_t>(first_block + 2 * static_cast<uint32_t>(pair));
    counter0[pair] = _mm_set1_epi64x(id);
    counter1[pair] = _mm_set1_epi64x(static_cast<int64_t>(static_cast<uint64_t>(id) >> 32));
    counter2[pair] = _mm_set_epi64x(block + 1, block);
    counter3[pair] = _mm_set1_epi64x(stream);
  }
  auto key0 = static_cast<uint32_t>(key);
  auto key1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const __m128i wide_key0 = _mm_set1_epi64x(key0);
    const __m128i wide_key1 = _mm_set1_epi64x(key1);
#pragma GCC unroll 8
    for (int pair = 0; pair < kPairs; ++pair) {
      const __m128i product0 = _mm_mul_epu32(counter0[pair], factor0);
      const __m128i product1 = _mm_mul_epu32(counter2[pair], factor1);
      counter0[pair] = _mm_xor_si128(_mm_xor_si128(_mm_srli_epi64(product1, 32), counter1[pair]), wide_key0);
      counter1[pair] = product1;
      counter2[pair] = _mm_xor_si128(_mm_xor_si128(_mm_srli_epi64(product0, 32), counter3[pair]), wide_key1);
      counter3[pair] = product0;
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const __m128i low = _mm_set1_epi64x(0xFFFFFFFFll);
  for (int pair = 0; pair < kPairs; ++pair) {
    const __m128i words01 = _mm_or_si128(_mm_and_si128(counter0[pair], low), _mm_slli_epi64(counter1[pair], 32));
    const __m128i words23 = _mm_or_si128(_mm_and_si128(counter2[pair], low), _mm_slli_epi64(counter3[pair], 32));
    auto* out = reinterpret_cast<__m128i*>(words + 8 * pair);
    _mm_storeu_si128(out, _mm_unpacklo_epi64(words01, words23));
    _mm_storeu_si128(out + 1, _mm_unpackhi_epi64(words01, words23));
  }
}
#else
template <int kBlocks>
TORCHREC_DYN_INLINE void random_blocks(uint64_t key, int64_t id, uint32_t first_block, uint32_t stream,
                                       uint32_t* words) {
  for (int block = 0; block < kBlocks; ++block) {
    const Philox4 four = random_words(key, id, first_block + static_cast<uint32_t>(block), stream);
    std::memcpy(words + 4 * block, four.words, sizeof four);
  }
}
#endif

constexpr int64_t kMostRandomWords = 64;  // in one call of `use` by for_random_columns

#if defined(TORCHREC_DYN_DISPATCH)
constexpr int kWideBlocks = 16;

inline const bool has_wide_blocks = __builtin_cpu_supports("avx512f") != 0;

// As random_blocks<kWideBlocks>, in two registers of 512 bits: a third of the time.
[[gnu::target("avx512f"), maybe_unused]] static void random_wide_blocks(uint64_t key, int64_t id, uint32_t first_block,
                                                                        uint32_t stream, uint32_t* words) {
  constexpr int kHalves = 2;
  constexpr int kXor3 = 0x96;
  constexpr __mmask8 kAll = 0xFF;  // forms without a mask make GCC warn
  const __m512i factor0 = _mm512_set1_epi64(0xD2511F53ll), factor1 = _mm512_set1_epi64(0xCD9E8D57ll);
  const __m512i step0 = _mm512_set1_epi64(0x9E3779B9ll), step1 = _mm512_set1_epi64(0xBB67AE85ll);
  __m512i key0 = _mm512_set1_epi64(static_cast<int64_t>(key & 0xFFFFFFFFull));
  __m512i key1 = _mm512_set1_epi64(static_cast<int64_t>(key >> 32));
  __m512i counter0[kHalves], counter1[kHalves], counter2[kHalves], counter3[kHalves];
  for (int half = 0; half < kHalves; ++half) {
    counter0[half] = _mm512_set1_epi64(id);
    counter1[half] = _mm512_set1_epi64(static_cast<int64_t>(static_cast<uint64_t>(id) >> 32));
    counter2[half] = _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(first_block) + 8 * half),
                                      _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
    counter3[half] = _mm512_set1_epi64(stream);
  }
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 2
    for (int half = 0; half < kHalves; ++half) {
      const __m512i product0 = _mm512_maskz_mul_epu32(kAll, counter0[half], factor0);
      const __m512i product1 = _mm512_maskz_mul_epu32(kAll, counter2[half], factor1);
      counter0[half] =
          _mm512_ternarylogic_epi64(_mm512_maskz_srli_epi64(kAll, product1, 32), counter1[half], key0, kXor3);
      counter1[half] = product1;
      counter2[half] =
          _mm512_ternarylogic_epi64(_mm512_maskz_srli_epi64(kAll, product0, 32), counter3[half], key1, kXor3);
      counter3[half] = product0;
    }
    key0 = _mm512_add_epi64(key0, step0);
    key1 = _mm512_add_epi64(key1, step1);
  }
  const __m512i low = _mm512_set1_epi64(0xFFFFFFFFll);
  const __m512i first_four = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0);
  const __m512i last_four = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
  for (int half = 0; half < kHalves; ++half) {
    const __m512i words01 =
        _mm512_or_si512(_mm512_and_si512(counter0[half], low), _mm512_maskz_slli_epi64(kAll, counter1[half], 32));
    const __m512i words23 =
        _mm512_or_si512(_mm512_and_si512(counter2[half], low), _mm512_maskz_slli_epi64(kAll, counter3[half], 32));
    _mm512_storeu_si512(words + 32 * half, _mm512_permutex2var_epi64(words01, first_four, words23));
    _mm512_storeu_si512(words + 32 * half + 16, _mm512_permutex2var_epi64(words01, last_four, words23));
  }
}
#endif

// The words of as many blocks as this machine computes together; returns their number.
TORCHREC_DYN_INLINE int64_t random_many_blocks(uint64_t key, int64_t id, uint32_t first_block, uint32_t stream,
                                               uint32_t* words) {
#if defined(TORCHREC_DYN_DISPATCH)
  if (has_wide_blocks) {
    random_wide_blocks(key, id, first_block, stream, words);
    return kWideBlocks;
  }
#endif
  constexpr int kMany = 8;
  random_blocks<kMany>(key, id, first_block, stream, words);
  return kMany;
}

// Walks over columns [first_column, first_column + columns) of the row of `id`, four columns a block, and calls
// use(words, place, begin, end): words[place] is the word of column first_column + begin, and the words of the columns
// up to first_column + end follow it.
template <typename Use>
TORCHREC_DYN_INLINE void for_random_columns(uint64_t key, int64_t id, uint32_t stream, int64_t first_column,
                                            int64_t columns, const Use& use) {
  constexpr int kPerBlock = 4;
  constexpr int kFew = 4;  // for a short row, which would not use most of many blocks
  uint32_t words[kMostRandomWords];
  int64_t block = first_column / kPerBlock;
  int64_t place = first_column % kPerBlock;
  for (int64_t begin = 0; begin < columns;) {
    const bool few = place + columns - begin <= kFew * kPerBlock;
    int64_t blocks = kFew;
    if (few)
      random_blocks<kFew>(key, id, static_cast<uint32_t>(block), stream, words);
    else
      blocks = random_many_blocks(key, id, static_cast<uint32_t>(block), stream, words);
    const int64_t left = columns - begin;
    const int64_t taken = blocks * kPerBlock - place < left ? blocks * kPerBlock - place : left;
    use(words, place, begin, begin + taken);
    begin += taken;
    block += blocks;
    place = 0;
  }
}

}  // namespace torchrec_dyn
