// How lanes, warps and blocks take turns. All of it is drawn from a seed, so that a run can be repeated.
//
//   converged  of a warp, the lanes with the lowest instruction go first: they wait for each other where branches meet,
//              as they mostly do on a GPU
//   random     lanes that are at any one instruction go for a few instructions, then others
//   split      as random, and lanes at one instruction part by chance: what independent thread scheduling allows
//   mixed      one of the three, drawn for each launch
//
// Blocks begin in order; one to eight of them are there at a time.
#pragma once

#include <cstdint>

#include "warp.h"

namespace torchrec_dyn::ptx {

// xorshift64 (Marsaglia 2003).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed | 1) {}
  uint32_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<uint32_t>(state_ >> 32);
  }
  // In [0, end).
  uint32_t below(uint32_t end) { return next() % end; }

 private:
  uint64_t state_;
};

enum class Schedule : uint8_t { kConverged, kRandom, kSplit };

struct Turns {
  Schedule schedule;
  Random random;
  uint64_t steps_left;
};

// By the environment and the number of the launch in this process.
Turns next_turns();

// Runs some instructions of lanes of a warp. Returns false if none of them can go on.
bool run_turn(Warp& warp, Turns& turns);

// Lets the threads of a block go on if all that have not ended wait at its barrier (barriers.cpp). Returns true then.
bool pass_barrier(Block& block);
// Of a block none of whose threads can go on.
[[noreturn]] void fail_deadlock(const Block& block);

}  // namespace torchrec_dyn::ptx
