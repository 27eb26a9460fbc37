// Tiles for bodies (simt.h): the 16 lanes that serve one item together, such as a row. On a GPU the lanes are threads
// of one warp; in the simt build one thread runs all of them, lane after lane.
//
// tiles(queue, n, body) calls body(i) for the items i in [0, n). What a body does outside of each_lane is done for the
// item as a whole: every thread of the tile does the same, and takes the same branches. Numbers that differ
// from lane to lane are PerLane, and pass from lane to lane by the functions below only. sum_of_lanes is a barrier,
// too: memory that all lanes have read before it may be written by one of them after it.
#pragma once

#include <cstdint>

#include "simd.h"
#include "simt.h"

namespace torchrec_dyn::simt {

constexpr int kTileLanes = static_cast<int>(kLanes);

// A T of each lane; on a GPU a thread has its own only.
template <typename T>
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
  TORCHREC_DYN_BOTH const T (&all() const)[kTileLanes] { return all_; }

 private:
  T all_[kTileLanes];
#endif
};

#if defined(__CUDA_ARCH__)
// The threads of this tile in their warp.
__device__ inline unsigned tile_threads() { return 0xFFFFu << (threadIdx.x & 16); }
#endif

// Calls turn(lane) for every lane of the tile.
template <typename Turn>
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void each_lane(const Turn& turn) {
#if defined(__CUDA_ARCH__)
  turn(static_cast<int>(threadIdx.x % kTileLanes));
#else
  for (int lane = 0; lane < kTileLanes; ++lane) turn(lane);
#endif
}

// The number of one lane. T: of 32 or 64 bits.
template <typename T>
TORCHREC_DYN_BOTH inline T from_lane(const PerLane<T>& numbers, int lane) {
#if defined(__CUDA_ARCH__)
  return __shfl_sync(tile_threads(), numbers[lane], lane, kTileLanes);
#else
  return numbers[lane];
#endif
}

// How many lanes have true.
TORCHREC_DYN_BOTH inline int count_lanes(const PerLane<bool>& flags) {
#if defined(__CUDA_ARCH__)
  return __popc(__ballot_sync(tile_threads(), flags[0]));
#else
  int count = 0;
  for (const bool flag : flags.all()) count += flag;
  return count;
#endif
}

// As sum_of_lanes (simd.h), with its bits.
TORCHREC_DYN_BOTH inline float sum_of_lanes(const PerLane<float>& numbers) {
#if defined(__CUDA_ARCH__)
  __syncwarp(tile_threads());
  float sum = numbers[0];
  for (int distance = kTileLanes / 2; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(tile_threads(), sum, distance, kTileLanes);
  return sum;
#else
  return torchrec_dyn::sum_of_lanes(numbers.all());
#endif
}

// Calls body(i) for the items i in [0, n), each on a tile.
template <typename Body>
void tiles(const Queue& queue, int64_t n, const Body& body);

}  // namespace torchrec_dyn::simt
