// The CUDA build of simt.h, for files *_launch.cu: each TORCHREC_DYN_LAUNCH(Body) compiles one kernel, and
// each TORCHREC_DYN_LAUNCH_TILES(Body) one kernel of tiles.
#pragma once

#include <cuda_runtime.h>

#include "cuda_errors.h"
#include "simt.h"
#include "simt_tiles.h"

namespace torchrec_dyn::simt {

inline cudaStream_t stream_of(const Queue& queue) { return static_cast<cudaStream_t>(queue.stream); }

constexpr int64_t kThreadsABlock = 256;

// Body::kBlocksAtOnce: how many blocks of it an SM shall hold, which limits its registers; 0: as nvcc chooses.
template <typename Body>
constexpr int blocks_at_once() {
  if constexpr (requires { Body::kBlocksAtOnce; }) return Body::kBlocksAtOnce;
  return 0;
}

template <typename Body>
__global__ void __launch_bounds__(kThreadsABlock, blocks_at_once<Body>())
    each_turn(int64_t n, const __grid_constant__ Body body) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreadsABlock;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreadsABlock + threadIdx.x; i < n; i += stride) body(i);
}

constexpr int kTileThreads = 128;  // of a block
template <typename Body>
constexpr int kTilesABlock = kTileThreads / Body::kLanes;

template <typename Body>
__global__ void __launch_bounds__(kTileThreads, blocks_at_once<Body>())
    each_tile(int64_t n, const __grid_constant__ Body body) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kTilesABlock<Body> + threadIdx.x / Body::kLanes;
  if (i < n) body(i);
}

inline unsigned blocks_for(int64_t n, int64_t items_a_block) {
  constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
  return static_cast<unsigned>(lesser_of((n + items_a_block - 1) / items_a_block, kMostBlocks));
}

template <typename Body>
void each(const Queue& queue, int64_t n, const Body& body) {
  if (n <= 0) return;
  each_turn<<<blocks_for(n, kThreadsABlock), kThreadsABlock, 0, stream_of(queue)>>>(n, body);
  check_cuda(cudaGetLastError(), "a launch");
}

template <typename Body>
void tiles(const Queue& queue, int64_t n, const Body& body) {
  if (n <= 0) return;
  each_tile<<<blocks_for(n, kTilesABlock<Body>), kTileThreads, 0, stream_of(queue)>>>(n, body);
  check_cuda(cudaGetLastError(), "a launch");
}

}  // namespace torchrec_dyn::simt

#define TORCHREC_DYN_LAUNCH(Body) \
  template void torchrec_dyn::simt::each<Body>(const torchrec_dyn::simt::Queue&, int64_t, const Body&)
#define TORCHREC_DYN_LAUNCH_TILES(Body) \
  template void torchrec_dyn::simt::tiles<Body>(const torchrec_dyn::simt::Queue&, int64_t, const Body&)
