// The simt build of simt.h: kernels on threads of the CPU, for tests.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <latch>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "device_errors.h"
#include "simt.h"
#include "simt_tiles.h"

namespace torchrec_dyn::simt {

// How often the host of a GPU would have waited for it: tests/support/mock_device.py reads it by its name.
extern "C" {
[[gnu::used, gnu::visibility("default")]] inline std::atomic<int64_t> torchrec_dyn_host_waits{0};
// Not 0: as a GPU that runs no more kernels. Tests set it by its name.
[[gnu::used, gnu::visibility("default")]] inline std::atomic<int64_t> torchrec_dyn_lost_device{0};
// The number of the GPU whose tensors the next calls of this thread have: mock_device.py calls it by its name.
[[gnu::used, gnu::visibility("default")]] inline void torchrec_dyn_choose_gpu(int64_t gpu);
}

constexpr int64_t kGpus = 2;  // of the mock device
inline thread_local int64_t chosen_gpu = 0;
inline void torchrec_dyn_choose_gpu(int64_t gpu) { chosen_gpu = gpu; }

constexpr int64_t kThreads = 4;  // more than the cores of CI: threads are also interrupted between two instructions

// Neighbours run on different threads, which begin together, so that conflicts are as frequent as on a GPU.
template <typename Kernel>
void launch(const Stream&, int64_t n, const Kernel& kernel) {
  const int64_t count = std::min(n, kThreads);
  std::latch begin(std::max<int64_t>(count, 1));
  const auto run = [&](int64_t first) {
    begin.arrive_and_wait();
    for (int64_t i = first; i < n; i += kThreads) kernel(i);
  };
  std::vector<std::thread> threads;
  for (int64_t first = 1; first < count; ++first) threads.emplace_back(run, first);
  run(0);
  for (std::thread& thread : threads) thread.join();
}

template <typename Kernel>
void launch_tiles(const Stream& stream, int64_t n, const Kernel& kernel) {
  if constexpr (ChoosesItems<Kernel>)
    launch(stream, n, [&kernel](int64_t i) {
      if (kernel.is_item(i)) kernel(i);
    });
  else
    launch(stream, n, kernel);
}

inline void exclusive_sum(const Stream&, int64_t* words, int64_t n) {
  std::exclusive_scan(words, words + n, words, int64_t{0});
}

template <typename Key, typename Value>
PairsOf<Key, Value> sort_pairs(const Stream&, PairsOf<Key, Value> pairs, int64_t n, int first_bit, int end_bit) {
  const int above = 64 - end_bit;
  const auto bits = [=](uint64_t key) { return key << above >> above >> first_bit; };
  if (n == 0 || end_bit == first_bit) return pairs;
  std::vector<std::pair<Key, Value>> both;
  for (int64_t i = 0; i < n; ++i) both.emplace_back(pairs.keys[i], pairs.values[i]);
  std::ranges::stable_sort(both, {}, [&](const auto& pair) { return bits(pair.first); });
  for (int64_t i = 0; i < n; ++i) std::tie(pairs.keys[i], pairs.values[i]) = both[static_cast<size_t>(i)];
  return pairs;
}

inline void fill_zero(const Stream&, void* memory, int64_t bytes) {
  if (bytes > 0) std::memset(memory, 0, static_cast<size_t>(bytes));
}

inline void copy_to_host(const Stream&, void* host, const void* memory, int64_t bytes) {
  torchrec_dyn_host_waits += bytes > 0;
  if (bytes > 0) std::memcpy(host, memory, static_cast<size_t>(bytes));
}

struct HostCopy::Memory {
  std::vector<int64_t> words;
};
inline HostCopy::HostCopy(const Stream&, const int64_t* words, int64_t count)
    : memory_(new Memory{{words, words + count}}) {}
inline HostCopy::~HostCopy() { delete memory_; }
inline const int64_t* HostCopy::wait() {
  ++torchrec_dyn_host_waits;
  return memory_->words.data();
}

inline int64_t* error_record() {
  static int64_t records[kGpus][kErrorWords] = {};
  return records[chosen_gpu];
}

inline void raise_lost_device() {
  if (torchrec_dyn_lost_device != 0)
    throw std::runtime_error(
        "torchrec_dyn: expected an allocation to succeed, got a lost device. Restart the process.");
}

inline void take_error(int64_t (&record)[kErrorWords]) {
  ++torchrec_dyn_host_waits;
  std::memcpy(record, error_record(), sizeof record);
  std::memset(error_record(), 0, sizeof record);
}

inline void copy_to_device(const Stream&, void* memory, const void* host, int64_t bytes) {
  if (bytes > 0) std::memcpy(memory, host, static_cast<size_t>(bytes));
}

}  // namespace torchrec_dyn::simt
