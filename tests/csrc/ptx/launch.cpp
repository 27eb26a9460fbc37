// A launch from its arguments to its result.
#include <mutex>
#include <new>

#include "faults.h"
#include "grid.h"
#include "schedule.h"

namespace torchrec_dyn::ptx {
namespace {

constexpr uint32_t kMostResident = 8, kMostTurns = 8;
constexpr size_t kMostShared = 48 * 1024;  // without cudaFuncSetAttribute

// CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
int check_launch(const Kernel& kernel, const Launch& launch) {
  const Extent &grid = launch.grid, &block = launch.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const auto refuse = [&](int error, const std::string& what) {
    report(demangled(kernel.name) + ": " + what + ".");
    return error;
  };
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7FFFFFFF || grid.y > 65535 || grid.z > 65535)
    return refuse(9, "expected a grid of 1 to 2^31 - 1, 65535 and 65535 blocks, got " + std::to_string(grid.x) + ", " +
                         std::to_string(grid.y) + ", " + std::to_string(grid.z));
  if (threads == 0 || threads > 1024 || block.x > 1024 || block.y > 1024 || block.z > 64)
    return refuse(9, "expected a block of 1 to 1024 threads, got " + std::to_string(block.x) + ", " +
                         std::to_string(block.y) + ", " + std::to_string(block.z));
  if (kernel.max_threads != 0 && threads > static_cast<uint64_t>(kernel.max_threads))
    return refuse(1, "expected at most " + std::to_string(kernel.max_threads) + " threads by its launch bounds, got " +
                         std::to_string(threads));
  if (kernel.shared_bytes + launch.shared_bytes > kMostShared)
    return refuse(1, "expected at most " + std::to_string(kMostShared) + " bytes of shared memory, got " +
                         std::to_string(kernel.shared_bytes + launch.shared_bytes));
  return 0;
}

// Gives one warp of the block some turns. Returns false if none can go on.
bool run_some(Block& block, Turns& turns) {
  const size_t warps = block.warps.size(), first = turns.random.below(static_cast<uint32_t>(warps));
  for (size_t i = 0; i < warps; ++i) {
    Warp& warp = block.warps[(first + i) % warps];
    if (warp.alive == 0 || !run_turn(warp, turns)) continue;
    for (uint32_t left = turns.random.below(kMostTurns); left > 0 && warp.alive != 0; --left)
      if (!run_turn(warp, turns)) break;
    return true;
  }
  return false;
}

bool has_ended(const Block& block) {
  for (const Warp& warp : block.warps)
    if (warp.alive != 0) return false;
  return true;
}

struct Run {
  Grid& grid;
  Turns& turns;
};

void run_blocks(void* argument) {
  auto& [grid, turns] = *static_cast<Run*>(argument);
  std::vector<Block*>& resident = grid.resident();
  const uint32_t most_resident = 1 + turns.random.below(kMostResident);
  uint64_t next = 0;
  while (next < grid.blocks() || !resident.empty()) {
    while (resident.size() < most_resident && next < grid.blocks()) grid.start_block(next++);
    const size_t place = turns.random.below(static_cast<uint32_t>(resident.size()));
    Block& block = *resident[place];
    const bool moved = run_some(block, turns);
    if (has_ended(block)) {
      grid.end_block(place);
    } else if (!pass_barrier(block) && !moved) {
      fail_deadlock(block);
    }
  }
}

int run(Kernel& kernel, const Launch& launch) {
  Turns turns = next_turns();
  Grid grid(kernel, launch, kMostResident);
  Run run{grid, turns};
  try {
    if (run_guarded(grid.state(), run_blocks, &run)) return 0;
    const Access& access = grid.state().access;
    fail(700, *access.warp, *access.instruction, access.lane,
         "expected an address of the device, got " + hexadecimal(access.address) + ", where no memory is");
  } catch (const Fault& fault) {
    report(fault.text);
    return fault.error;
  }
}

std::mutex& one_launch() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

}  // namespace

int launch(Kernel& kernel, const Launch& launch) {
  const std::lock_guard hold(one_launch());
  if (const int error = check_launch(kernel, launch); error != 0) return error;
  const uint64_t blocks = uint64_t{launch.grid.x} * launch.grid.y * launch.grid.z;
  ++kernel.counts.launches;
  kernel.counts.threads += blocks * launch.block.x * launch.block.y * launch.block.z;
  kernel.counts.most_blocks = std::max(kernel.counts.most_blocks, blocks);
  try {
    return run(kernel, launch);
  } catch (const std::bad_alloc&) {  // of the emulator's own memory
    return 2;
  }
}

}  // namespace torchrec_dyn::ptx
