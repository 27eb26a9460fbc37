// The state of a launch while it runs: a grid, its resident blocks, their warps. Handlers read and write registers
// here.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "program.h"

namespace torchrec_dyn::ptx {

struct Races;
struct Block;
struct LaneTimes;  // races.h

struct Warp {
  Block* block;
  uint32_t number;  // in its block
  uint64_t* registers;
  uint32_t* predicates;
  uint8_t* local;  // of all lanes, one after the other

  uint32_t place[kLanes];               // the next instruction of each lane
  uint32_t alive, waiting, at_barrier;  // lanes: not exited; at a .sync; at a barrier of the block
  uint32_t member_mask[kLanes];         // of the lanes that wait
  bool is_descending;                   // the order of lanes that access one address with one instruction
  LaneTimes* times;                     // null: races are not looked for
};

// What a memory access in progress touches: the handler of SIGSEGV reads it (faults.h).
struct Access {
  const Warp* warp = nullptr;
  const Instruction* instruction = nullptr;
  int lane = 0;
  uintptr_t address = 0;
  size_t bytes = 0;
};

// What all blocks of a launch share.
struct GridState {
  Kernel* kernel;
  Extent grid, block;
  uint32_t threads;  // of a block
  size_t shared_bytes;
  uint8_t* parameters;
  uintptr_t stack_begin, stack_end;      // of the host thread
  uintptr_t private_begin, private_end;  // the shared and local memory of all blocks
  bool is_checked_further;               // races, ASan or a range check look at each access
  Races* races;                          // or null
  Access access;
};

struct Block {
  GridState* grid;
  uint64_t number;
  uint8_t* shared;
  uint32_t barriers;  // passed so far
  std::vector<Warp> warps;
};

// An error of a kernel. It ends the launch.
struct Fault {
  int error;  // a cudaError
  std::string text;
};

// "<kernel>, block 0, warp 1, lane 2, PTX line 3 (ret)".
std::string place_of(const Warp& warp, const Instruction& instruction, int lane);
[[noreturn]] void fail(int error, const Warp& warp, const Instruction& instruction, int lane, const std::string& what);
std::string hexadecimal(uint64_t number);

// The handler of all that the emulator does not know.
void run_unsupported(Warp& warp, const Instruction& instruction, uint32_t lanes);

inline uint64_t* written(const Warp& warp, Operand operand) {
  return warp.registers + static_cast<size_t>(operand) * kLanes;
}

inline const uint64_t* read(const Warp& warp, Operand operand) {
  const uint64_t* rows = operand >= 0 ? warp.registers : warp.block->grid->kernel->constants.data();
  return rows + static_cast<size_t>(operand >= 0 ? operand : ~operand) * kLanes;
}

inline uint32_t read(const Warp& warp, Predicate predicate) {
  return warp.predicates[predicate.number] ^ predicate.negated;
}

inline void write(Warp& warp, Predicate predicate, uint32_t lanes, uint32_t bits) {
  uint32_t& word = warp.predicates[predicate.number];
  word = (word & ~lanes) | (bits & lanes);
}

inline bool has_lane(uint32_t lanes, int lane) { return (lanes >> lane & 1) != 0; }
inline int first_lane(uint32_t lanes) { return std::countr_zero(lanes); }

// Runs body(lane) for each of the lanes. Most often all of them take part: a plain loop is several times faster.
template <typename Body>
inline void for_lanes(uint32_t lanes, const Body& body) {
  if (lanes == kAllLanes) {
    for (int lane = 0; lane < kLanes; ++lane) body(lane);
  } else {
    for (; lanes != 0; lanes &= lanes - 1) body(first_lane(lanes));
  }
}

// The word of a register as a T.
template <typename T>
inline T as(uint64_t word) {
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<float>(static_cast<uint32_t>(word));
  } else if constexpr (std::is_same_v<T, double>) {
    return std::bit_cast<double>(word);
  } else {
    return static_cast<T>(word);
  }
}

// A result as the word of a register. PTX ISA, "Floating Point Instructions": a NaN of .f32 is 0x7fffffff.
template <typename T>
inline uint64_t word_of(T number) {
  if constexpr (std::is_same_v<T, float>) {
    return std::isnan(number) ? 0x7FFFFFFFu : std::bit_cast<uint32_t>(number);
  } else if constexpr (std::is_same_v<T, double>) {
    return std::bit_cast<uint64_t>(number);
  } else {
    return static_cast<uint64_t>(number);
  }
}

}  // namespace torchrec_dyn::ptx
