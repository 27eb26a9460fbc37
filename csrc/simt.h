// Kernels for CUDA that a plain C++ compiler builds too, so that their tests need no GPU (docs/dev/decisions/0027).
//
// A kernel is a struct of numbers and pointers with `void operator()(int64_t i) const`, in a file *_kernels.h; a thread
// runs it for one i. The function of an op, in a file *_cuda.cpp, calls launch(stream, n, kernel). There are two builds
// of both files:
//   CUDA  nvcc compiles the kernels (a file *_launch.cu names them);
//   simt  g++ compiles everything with TORCHREC_DYN_SIMT into a library for tests, in which a few std::threads run the
//         threads of a launch (simt_cpu.h). Its tensors are on the CPU.
//
// Rules for kernels, so that what holds in one build holds in the other:
//   - the threads of a launch run in any order and at the same time;
//   - a word that several threads of a launch read and write is accessed by the functions below only, and nothing else
//     is handed from thread to thread: they do not order other accesses;
//   - no locks, no waiting for another thread, no exceptions;
//   - functions that kernels call are marked TORCHREC_DYN_BOTH; bits are scanned by lowest_bit.
#pragma once

#include <cstdint>
#include <type_traits>

#include "both_devices.h"

#if !defined(__CUDACC__)
#include <atomic>
#endif

namespace torchrec_dyn::simt {

// Memory for one call of an op, on its device. It lives until the kernels of the call have run.
class Workspace {
 public:
  virtual void* allocate(int64_t bytes) = 0;

 protected:
  ~Workspace() = default;
};

// Where kernels are sent: they run one after the other, and after the kernels that torch sent before.
struct Stream {
  void* handle;  // cudaStream_t; null in the simt build
  Workspace* workspace;
};

// Writes `desired` if the word, of 32 or 64 bits, is `expected`. Returns the word as it was.
template <typename Word>
TORCHREC_DYN_BOTH inline Word atomic_cas(Word* word, std::type_identity_t<Word> expected,
                                         std::type_identity_t<Word> desired) {
#if defined(__CUDA_ARCH__)
  using Unsigned = std::conditional_t<sizeof(Word) == 4, unsigned, unsigned long long>;
  return static_cast<Word>(
      atomicCAS(reinterpret_cast<Unsigned*>(word), static_cast<Unsigned>(expected), static_cast<Unsigned>(desired)));
#elif defined(__CUDACC__)  // nvcc's host side, never called
  return *word == expected ? (*word = desired, expected) : *word;
#else
  std::atomic_ref<Word>(*word).compare_exchange_strong(expected, desired, std::memory_order_relaxed);
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
TORCHREC_DYN_BOTH inline Word atomic_add(Word* word, std::type_identity_t<Word> number) {
#if defined(__CUDA_ARCH__)
  using Unsigned = std::conditional_t<sizeof(Word) == 4, unsigned, unsigned long long>;
  return static_cast<Word>(atomicAdd(reinterpret_cast<Unsigned*>(word), static_cast<Unsigned>(number)));
#elif defined(__CUDACC__)
  return (*word += number) - number;
#else
  return std::atomic_ref<Word>(*word).fetch_add(number, std::memory_order_relaxed);
#endif
}

// Adds 1 to a word in which many threads count. Those of a warp that do so at the same time add once together.
template <typename Word>
TORCHREC_DYN_BOTH inline void warp_aggregated_increment(Word* word) {
#if defined(__CUDA_ARCH__)
  const unsigned together = __match_any_sync(__activemask(), reinterpret_cast<unsigned long long>(word));
  if (static_cast<int>(threadIdx.x % 32) == __ffs(static_cast<int>(together)) - 1) atomic_add(word, __popc(together));
#else
  atomic_add(word, 1);
#endif
}

// Writes `number` if it is less than the word.
TORCHREC_DYN_BOTH inline void atomic_min(int64_t* word, int64_t number) {
#if defined(__CUDA_ARCH__)
  atomicMin(reinterpret_cast<long long*>(word), static_cast<long long>(number));
#else
  for (int64_t seen = load(word); number < seen;) {
    const int64_t was = atomic_cas(word, seen, number);
    if (was == seen) return;
    seen = was;
  }
#endif
}

// Writes `number` if it is greater than the word.
TORCHREC_DYN_BOTH inline void atomic_max(int64_t* word, int64_t number) {
#if defined(__CUDA_ARCH__)
  atomicMax(reinterpret_cast<long long*>(word), static_cast<long long>(number));
#else
  for (int64_t seen = load(word); number > seen;) {
    const int64_t was = atomic_cas(word, seen, number);
    if (was == seen) return;
    seen = was;
  }
#endif
}

// Sets bits of a byte.
TORCHREC_DYN_BOTH inline void atomic_or(uint8_t* byte, uint8_t bits) {
#if defined(__CUDA_ARCH__)  // in the word around the byte, whose other bytes stay as they are
  const auto past = reinterpret_cast<uintptr_t>(byte) % sizeof(unsigned);
  atomicOr(reinterpret_cast<unsigned*>(byte - past), static_cast<unsigned>(bits) << (8 * past));
#elif defined(__CUDACC__)
  *byte = static_cast<uint8_t>(*byte | bits);
#else
  std::atomic_ref<uint8_t>(*byte).fetch_or(bits, std::memory_order_relaxed);
#endif
}

// Runs kernel(i) for i in [0, n), each on a thread.
template <typename Kernel>
void launch(const Stream& stream, int64_t n, const Kernel& kernel);

// Turns each of n words into the sum of the words before it.
void exclusive_sum(const Stream& stream, int64_t* words, int64_t n);

// Two arrays of n words.
template <typename Key, typename Value>
struct PairsOf {
  Key* keys;
  Value* values;
};
using Pairs = PairsOf<uint64_t, int64_t>;

// Sorts pairs by bits [first_bit, end_bit) of their keys; pairs with equal bits stay in their order. Returns the sorted
// arrays: these, or others in the workspace of the call. The contents of `pairs` are lost.
template <typename Key, typename Value>
PairsOf<Key, Value> sort_pairs(const Stream& stream, PairsOf<Key, Value> pairs, int64_t n, int first_bit = 0,
                               int end_bit = 8 * sizeof(Key));

void fill_zero(const Stream& stream, void* memory, int64_t bytes);
// Copies to the memory of the host. Waits for all kernels before it.
void copy_to_host(const Stream& stream, void* host, const void* memory, int64_t bytes);

// A copy of words to the host that is begun at once. `wait` waits for it and for the kernels before it, not for those
// after it, and returns the words, which live as long as this object.
class HostCopy {
 public:
  HostCopy(const Stream& stream, const int64_t* words, int64_t count);
  ~HostCopy();
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  const int64_t* wait();

  struct Memory;

 private:
  Memory* memory_;
};

// Copies from the memory of the host, which is free after the call. Does not wait. For kilobytes, in words of 8 bytes.
void copy_to_device(const Stream& stream, void* memory, const void* host, int64_t bytes);

}  // namespace torchrec_dyn::simt
