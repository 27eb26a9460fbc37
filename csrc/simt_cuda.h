// The CUDA build of simt.h, for files *_launch.cu: each TORCHREC_DYN_LAUNCH(Kernel, ...) compiles kernels, and
// each TORCHREC_DYN_LAUNCH_TILES(Kernel) one kernel of tiles.
#pragma once

#include <cuda_runtime.h>

#include <tuple>

#include "cuda_errors.h"
#include "simt.h"
#include "simt_tiles.h"

namespace torchrec_dyn::simt {

inline cudaStream_t cuda_stream(const Stream& stream) { return static_cast<cudaStream_t>(stream.handle); }

constexpr int64_t kThreadsABlock = 256;

// Kernel::kBlocksAtOnce: how many blocks of it an SM shall hold, which limits its registers; 0: as nvcc chooses.
template <typename Kernel>
constexpr int blocks_at_once() {
  if constexpr (requires { Kernel::kBlocksAtOnce; }) return Kernel::kBlocksAtOnce;
  return 0;
}

template <typename Kernel>
__global__ void __launch_bounds__(kThreadsABlock, blocks_at_once<Kernel>())
    run_threads(int64_t n, const __grid_constant__ Kernel kernel) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreadsABlock;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreadsABlock + threadIdx.x; i < n; i += stride) kernel(i);
}

constexpr int kTileThreads = 128;  // of a block
template <typename Kernel>
constexpr int kTilesABlock = kTileThreads / Kernel::kLanes;

template <typename Kernel>
__global__ void __launch_bounds__(kTileThreads, blocks_at_once<Kernel>())
    run_tiles(int64_t n, const __grid_constant__ Kernel kernel) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kTilesABlock<Kernel> + threadIdx.x / Kernel::kLanes;
  if (i < n) kernel(i);
}

// For kernels with is_item: a block lists the items among kTileThreads numbers, and its tiles take them in turn. So all
// tiles of a warp are busy also where few numbers are items.
template <typename Kernel>
__global__ void __launch_bounds__(kTileThreads, blocks_at_once<Kernel>())
    run_chosen_tiles(int64_t n, const __grid_constant__ Kernel kernel) {
  constexpr int kWarps = kTileThreads / 32;
  __shared__ uint8_t chosen[kTileThreads];
  __shared__ int counts[kWarps];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTileThreads;
  const int own = static_cast<int>(threadIdx.x), warp = own / 32;
  const bool is_item = first + own < n && kernel.is_item(first + own);
  const unsigned items = __ballot_sync(~0u, is_item);
  if (own % 32 == 0) counts[warp] = __popc(items);
  __syncthreads();
  if (is_item) {
    int place = __popc(items & ((1u << own % 32) - 1));
    for (int w = 0; w < warp; ++w) place += counts[w];
    chosen[place] = static_cast<uint8_t>(own);
  }
  int count = 0;
  for (int w = 0; w < kWarps; ++w) count += counts[w];
  __syncthreads();
#pragma unroll 1
  for (int place = own / Kernel::kLanes; place < count; place += kTilesABlock<Kernel>) kernel(first + chosen[place]);
}

inline unsigned blocks_for(int64_t n, int64_t items_a_block) {
  constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
  return static_cast<unsigned>(lesser_of((n + items_a_block - 1) / items_a_block, kMostBlocks));
}

template <typename Kernel>
void launch(const Stream& stream, int64_t n, const Kernel& kernel) {
  if (n <= 0) return;
  run_threads<<<blocks_for(n, kThreadsABlock), kThreadsABlock, 0, cuda_stream(stream)>>>(n, kernel);
  check_cuda(cudaGetLastError(), "a launch");
}

template <typename Kernel>
void launch_tiles(const Stream& stream, int64_t n, const Kernel& kernel) {
  if (n <= 0) return;
  if constexpr (ChoosesItems<Kernel>)
    run_chosen_tiles<<<blocks_for(n, kTileThreads), kTileThreads, 0, cuda_stream(stream)>>>(n, kernel);
  else
    run_tiles<<<blocks_for(n, kTilesABlock<Kernel>), kTileThreads, 0, cuda_stream(stream)>>>(n, kernel);
  check_cuda(cudaGetLastError(), "a launch");
}

// A list of kernels: what it points to is compiled with it.
template <typename... Kernels>
struct Launches {
  static const std::tuple<void (*)(const Stream&, int64_t, const Kernels&)...> all;
};
template <typename... Kernels>
const std::tuple<void (*)(const Stream&, int64_t, const Kernels&)...> Launches<Kernels...>::all{&launch<Kernels>...};

}  // namespace torchrec_dyn::simt

#define TORCHREC_DYN_LAUNCH(...) template struct torchrec_dyn::simt::Launches<__VA_ARGS__>
#define TORCHREC_DYN_LAUNCH_TILES(...)                                                                    \
  template void torchrec_dyn::simt::launch_tiles<__VA_ARGS__>(const torchrec_dyn::simt::Stream&, int64_t, \
                                                              const __VA_ARGS__&)
