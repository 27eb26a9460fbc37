// Tiles for kernels (simt.h): the 4, 8 or 16 lanes that serve one item together, such as a row. On a GPU the lanes are
// threads of one warp; in the simt build one thread runs all of them, lane after lane.
//
// launch_tiles(stream, n, kernel) runs kernel(i) for the items i in [0, n), on tiles of Kernel::kLanes lanes. A kernel
// may have is_item(i), which one thread runs: then it runs for those numbers only. What a kernel does outside of
// each_lane is done for the item as a whole: every thread of the tile does the same, and takes the same branches.
// Numbers that differ from lane to lane are PerLane, and pass from lane to lane by the functions below only. Memory
// that all lanes have read before sync_lanes may be written by one of them after it.
#pragma once

#include <cstdint>

#include "simd.h"
#include "simt.h"

namespace torchrec_dyn::simt {

// A T of each lane; on a GPU a thread has its own only.
template <typename T, int kLanes>
class PerLane {
 public:
#if defined(__CUDA_ARCH__)
  TORCHREC_DYN_BOTH T& operator[](int) { return own_; }
  TORCHREC_DYN_BOTH const T& operator[](int) const { return own_; }

 private:
  T own_;
#else
  TORCHREC_DYN_BOTH T& operator[](int lane) { return all_[lane]; }
  TORCHREC_DYN_BOTH const T& operator[](int lane) const { return all_[lane]; }

 private:
  T all_[kLanes];
#endif
};

#if defined(__CUDA_ARCH__)
// The threads of this tile in their warp.
template <int kLanes>
__device__ inline unsigned tile_threads() {
  return ((1u << kLanes) - 1) << (threadIdx.x & (32 - kLanes));
}
#endif

// Calls function(lane) for every lane of the tile.
template <int kLanes, typename Function>
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void each_lane(const Function& function) {
#if defined(__CUDA_ARCH__)
  function(static_cast<int>(threadIdx.x % kLanes));
#else
  for (int lane = 0; lane < kLanes; ++lane) function(lane);
#endif
}

template <int kLanes>
TORCHREC_DYN_BOTH inline void sync_lanes() {
#if defined(__CUDA_ARCH__)
  __syncwarp(tile_threads<kLanes>());
#endif
}

// The number of one lane. T: of 32 or 64 bits.
template <typename T, int kLanes>
TORCHREC_DYN_BOTH inline T shuffle(const PerLane<T, kLanes>& numbers, int lane) {
#if defined(__CUDA_ARCH__)
  return __shfl_sync(tile_threads<kLanes>(), numbers[lane], lane, kLanes);
#else
  return numbers[lane];
#endif
}

// For each lane the number of the lane with this bit of its own number flipped.
template <typename T, int kLanes>
TORCHREC_DYN_BOTH inline PerLane<T, kLanes> shuffle_xor(const PerLane<T, kLanes>& numbers, int bit) {
  PerLane<T, kLanes> flipped;
#if defined(__CUDA_ARCH__)
  flipped[0] = __shfl_xor_sync(tile_threads<kLanes>(), numbers[0], bit, kLanes);
#else
  for (int lane = 0; lane < kLanes; ++lane) flipped[lane] = numbers[lane ^ bit];
#endif
  return flipped;
}

// The number that all lanes have.
template <typename T, int kLanes>
TORCHREC_DYN_BOTH inline T same_of_lanes(const PerLane<T, kLanes>& numbers) {
  return numbers[0];
}

// How many lanes have true.
template <int kLanes>
TORCHREC_DYN_BOTH inline int ballot_count(const PerLane<bool, kLanes>& flags) {
#if defined(__CUDA_ARCH__)
  return __popc(__ballot_sync(tile_threads<kLanes>(), flags[0]));
#else
  int count = 0;
  for (int lane = 0; lane < kLanes; ++lane) count += flags[lane];
  return count;
#endif
}

template <typename Kernel>
concept ChoosesItems = requires(const Kernel& kernel, int64_t i) { kernel.is_item(i); };

// Runs kernel(i) for the items i in [0, n), each on a tile.
template <typename Kernel>
void launch_tiles(const Stream& stream, int64_t n, const Kernel& kernel);

}  // namespace torchrec_dyn::simt
