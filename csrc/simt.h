// Kernels for CUDA that a plain C++ compiler builds too, so that their tests need no GPU (docs/decisions/0027).
//
// A kernel is a body: a struct of numbers and pointers with `void operator()(int64_t i) const`, in a file *_kernels.h.
// The function of an op, in a file *_cuda.cpp, calls each(queue, n, body). There are two builds of both files:
//   CUDA  nvcc compiles the bodies (a file *_launch.cu names them), and i is a thread of a grid;
//   simt  g++ compiles everything with TORCHREC_DYN_SIMT into a library for tests, and i is a turn of one of several
//         std::threads (simt_cpu.h). Its tensors are on the CPU.
//
// Rules for bodies, so that what holds in one build holds in the other:
//   - the turns of a launch run in any order and at the same time;
//   - a word that several turns of a launch read and write is accessed by the functions below only, and nothing else
//     is handed from turn to turn: they do not order other accesses;
//   - no locks, no waiting for another turn, no exceptions;
//   - functions that bodies call are marked TORCHREC_DYN_BOTH; bits are scanned by bits.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "both_devices.h"

#if !defined(__CUDACC__)
#include <atomic>
#include <thread>
#endif

namespace torchrec_dyn::simt {

// Memory for one call of an op, on its device. It lives until the kernels of the call have run.
class Scratch {
 public:
  virtual void* take(int64_t bytes) = 0;

 protected:
  ~Scratch() = default;
};

// Where kernels are sent: they run one after the other, and after the kernels that torch sent before.
struct Queue {
  void* stream;  // cudaStream_t; null in the simt build
  Scratch* scratch;
};

// Writes `desired` if the word is `expected`. Returns the word as it was.
TORCHREC_DYN_BOTH inline int64_t compare_exchange(int64_t* word, int64_t expected, int64_t desired) {
#if defined(__CUDA_ARCH__)
  return static_cast<int64_t>(atomicCAS(reinterpret_cast<unsigned long long*>(word),
                                        static_cast<unsigned long long>(expected),
                                        static_cast<unsigned long long>(desired)));
#elif defined(__CUDACC__) || defined(TORCHREC_DYN_PLANTED_RACE)
  // nvcc's host side, never called; and the race that csrc/sanitize/run expects ThreadSanitizer to find.
  return *word == expected ? (*word = desired, expected) : *word;
#else
#if defined(TORCHREC_DYN_SLOW_TURNS)  // csrc/sanitize/run: other turns run between a turn's reads and its write
  thread_local unsigned calls = 0;
  if (++calls % 16 == 0) std::this_thread::yield();
#endif
  std::atomic_ref<int64_t>(*word).compare_exchange_strong(expected, desired, std::memory_order_relaxed);
  return expected;
#endif
}

// Word: of 1, 4 or 8 bytes.
template <typename Word>
TORCHREC_DYN_BOTH inline Word load(const Word* word) {
#if defined(__CUDACC__)
  return *static_cast<const volatile Word*>(word);
#else
  return std::atomic_ref<Word>(*const_cast<Word*>(word)).load(std::memory_order_relaxed);
#endif
}

template <typename Word>
TORCHREC_DYN_BOTH inline void store(Word* word, Word number) {
#if defined(__CUDACC__)
  *static_cast<volatile Word*>(word) = number;
#else
  std::atomic_ref<Word>(*word).store(number, std::memory_order_relaxed);
#endif
}

// Adds to the word, of 32 or 64 bits. Returns the word as it was.
template <typename Word>
TORCHREC_DYN_BOTH inline Word add(Word* word, std::type_identity_t<Word> number) {
#if defined(__CUDA_ARCH__)
  using Unsigned = std::conditional_t<sizeof(Word) == 4, unsigned, unsigned long long>;
  return static_cast<Word>(atomicAdd(reinterpret_cast<Unsigned*>(word), static_cast<Unsigned>(number)));
#elif defined(__CUDACC__)
  return (*word += number) - number;
#else
  return std::atomic_ref<Word>(*word).fetch_add(number, std::memory_order_relaxed);
#endif
}

// Adds 1 to a word that many turns count in. Threads of a warp that do so at the same time add once together.
template <typename Word>
TORCHREC_DYN_BOTH inline void count(Word* word) {
#if defined(__CUDA_ARCH__)
  const unsigned together = __match_any_sync(__activemask(), reinterpret_cast<unsigned long long>(word));
  if (static_cast<int>(threadIdx.x % 32) == __ffs(static_cast<int>(together)) - 1) add(word, __popc(together));
#else
  add(word, 1);
#endif
}

// Writes `number` if it is less than the word.
TORCHREC_DYN_BOTH inline void lower(int64_t* word, int64_t number) {
#if defined(__CUDA_ARCH__)
  atomicMin(reinterpret_cast<long long*>(word), static_cast<long long>(number));
#else
  for (int64_t seen = load(word); number < seen;) {
    const int64_t was = compare_exchange(word, seen, number);
    if (was == seen) return;
    seen = was;
  }
#endif
}

// Writes `number` if it is greater than the word.
TORCHREC_DYN_BOTH inline void raise(int64_t* word, int64_t number) {
#if defined(__CUDA_ARCH__)
  atomicMax(reinterpret_cast<long long*>(word), static_cast<long long>(number));
#else
  for (int64_t seen = load(word); number > seen;) {
    const int64_t was = compare_exchange(word, seen, number);
    if (was == seen) return;
    seen = was;
  }
#endif
}

// Sets bits of a byte.
TORCHREC_DYN_BOTH inline void set_bits(uint8_t* byte, uint8_t bits) {
#if defined(__CUDA_ARCH__)  // in the word around the byte, whose other bytes stay as they are
  const auto past = reinterpret_cast<uintptr_t>(byte) % sizeof(unsigned);
  atomicOr(reinterpret_cast<unsigned*>(byte - past), static_cast<unsigned>(bits) << (8 * past));
#elif defined(__CUDACC__)
  *byte = static_cast<uint8_t>(*byte | bits);
#else
  std::atomic_ref<uint8_t>(*byte).fetch_or(bits, std::memory_order_relaxed);
#endif
}

// Runs body(i) for i in [0, n).
template <typename Body>
void each(const Queue& queue, int64_t n, const Body& body);

// Turns each of n words into the sum of the words before it.
void exclusive_sum(const Queue& queue, int64_t* words, int64_t n);

// Two arrays of n words.
template <typename Key, typename Value>
struct PairsOf {
  Key* keys;
  Value* values;
};
using Pairs = PairsOf<uint64_t, int64_t>;
using ShortPairs = PairsOf<uint32_t, uint32_t>;

// Sorts pairs by bits [first_bit, end_bit) of their keys; pairs with equal bits stay in their order. Returns the sorted
// arrays: these, or others in the scratch memory of the call. The contents of `pairs` are lost.
Pairs sort_pairs(const Queue& queue, Pairs pairs, int64_t n, int first_bit = 0, int end_bit = 64);
ShortPairs sort_pairs(const Queue& queue, ShortPairs pairs, int64_t n, int first_bit = 0, int end_bit = 32);

void fill_zero(const Queue& queue, void* memory, int64_t bytes);
// Copies to the memory of the host. Waits for all kernels before it.
void read_back(const Queue& queue, void* host, const void* memory, int64_t bytes);
// Copies from the memory of the host, which is free after the call. Does not wait. For kilobytes, in words of 8 bytes.
void send(const Queue& queue, void* memory, const void* host, int64_t bytes);

}  // namespace torchrec_dyn::simt
