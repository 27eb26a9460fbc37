// Sorts words, key << 32 | place, by their keys, and keeps the order of words with equal keys. The places of these
// ascend.
//
// Source: least-significant-digit radix sort, Knuth, TAOCP vol. 3, section 5.2.5, algorithm R.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

namespace torchrec_dyn {

// Words to sort, and a second array of the same size. Not initialised: writing zeros first would cost a pass.
class SortableWords {
 public:
  explicit SortableWords(size_t most)
      : words_(std::make_unique_for_overwrite<uint64_t[]>(most)),
        other_(std::make_unique_for_overwrite<uint64_t[]>(most)) {}

  void clear() { size_ = 0; }

  // Keeps the word only if `wanted`, without a branch. Requires room for it in both cases.
  void push_if(bool wanted, uint64_t word) {
    words_[size_] = word;
    size_ += wanted;
  }

  std::span<const uint64_t> words() const { return {words_.get(), size_}; }

  void sort_by_high_word() {
    if (size_ < 512) {  // the low words ascend, so an ordinary sort keeps their order
      std::sort(words_.get(), words_.get() + size_);
      return;
    }
    uint64_t all_bits = 0;
    for (const uint64_t word : words()) all_bits |= word >> 32;
    const int bits = static_cast<int>(std::bit_width(all_bits));
    const int passes = (bits + kMostBits - 1) / kMostBits;
    for (int pass = 0, shift = 32; pass < passes; ++pass) {
      const int digit_bits = (32 + bits - shift + passes - pass - 1) / (passes - pass);  // even shares of the bits left
      sort_by_digit(shift, digit_bits);
      shift += digit_bits;
    }
  }

 private:
  static constexpr int kMostBits = 11;

  void sort_by_digit(int shift, int digit_bits) {
    const uint64_t mask = (uint64_t{1} << digit_bits) - 1;
    std::array<uint32_t, (size_t{1} << kMostBits) + 1> place{};
    for (const uint64_t word : words()) ++place[((word >> shift) & mask) + 1];
    for (size_t digit = 1; digit <= mask; ++digit) place[digit] += place[digit - 1];
    for (const uint64_t word : words()) other_[place[(word >> shift) & mask]++] = word;
    std::swap(words_, other_);
  }

  std::unique_ptr<uint64_t[]> words_;
  std::unique_ptr<uint64_t[]> other_;
  size_t size_ = 0;
};

}  // namespace torchrec_dyn
