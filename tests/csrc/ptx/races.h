// Races of a launch (PTX ISA, "Memory Consistency Model"): two threads access one byte, one of them writes, at least
// one access is weak (neither volatile nor relaxed nor stronger), and nothing orders them.
//
// What orders accesses: bar.warp.sync for its lanes; barriers of the block; and a release pattern that an acquire
// pattern observes: a fence, then a strong write, then a strong read of that value by another thread, then a fence
// there (or st.release, ld.acquire and the same of atom). Functions such as shfl.sync order nothing.
//
// Time is a number for each lane, raised at each release and each bar.warp.sync; a barrier of the block is an age of
// all its threads. A lane knows how far each other thread had come when that thread was last ordered before it.
#pragma once

#include <cstdint>
#include <memory>

#include "warp.h"

namespace torchrec_dyn::ptx {

// What a lane learned from threads outside of its warp, by strong accesses.
struct Learned;
using LearnedPointer = std::shared_ptr<const Learned>;

// What a release hands on, and to whom: to all, or to threads of one block if its scope is .cta.
struct Released {
  LearnedPointer learned;
  bool is_for_block = false;
  uint64_t block = 0;
};

struct LaneTimes {
  uint32_t known[kLanes];  // times of the lanes of the own warp, the own one's present time among them
  LearnedPointer learned;
  Released fenced;   // by the last fence of this lane
  Released pending;  // read by strong reads since the last fence
};

struct Races;
std::unique_ptr<Races, void (*)(Races*)> new_races();

// CUB's kernels hand over data by words of 16 bytes that hold value and flag, which this model calls a race.
bool looks_for_races(const Kernel& kernel);

void begin_times(Warp& warp);  // of a new block
void note_access(const Warp& warp, const Instruction& instruction, int lane, uintptr_t address, size_t bytes,
                 bool is_write);
void note_barrier(Block& block);

}  // namespace torchrec_dyn::ptx
