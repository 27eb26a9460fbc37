// Sorts words by their high 32 bits, keeping the order of equal ones: the dedupe sorts row << 32 | position,
// so that the gradients of one row are added in the order of the batch whatever the number of threads.
//
// Source: least-significant-digit radix sort, Knuth, TAOCP vol. 3, section 5.2.5, algorithm R.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace torchrec_dyn {

inline void sort_by_high_word(std::vector<uint64_t>& words) {
  constexpr int kDigitBits = 11;
  constexpr size_t kDigits = size_t{1} << kDigitBits;
  if (words.size() < 512) {  // the low words ascend, so an ordinary sort keeps their order
    std::sort(words.begin(), words.end());
    return;
  }
  uint64_t largest = 0;
  for (const uint64_t word : words) largest = std::max(largest, word >> 32);
  std::vector<uint64_t> other(words.size());
  for (int shift = 32; shift < 32 + static_cast<int>(std::bit_width(largest)); shift += kDigitBits) {
    std::vector<size_t> place(kDigits + 1, 0);
    for (const uint64_t word : words) ++place[((word >> shift) & (kDigits - 1)) + 1];
    for (size_t digit = 1; digit < kDigits; ++digit) place[digit] += place[digit - 1];
    for (const uint64_t word : words) other[place[(word >> shift) & (kDigits - 1)]++] = word;
    words.swap(other);
  }
}

}  // namespace torchrec_dyn
