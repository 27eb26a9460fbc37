// From an address of PTX to memory of the host, with all checks. PTX ISA, "State Spaces" and "Addresses as Operands".
//
// Generic and global addresses are the host's own. Shared, local and parameter addresses begin at 0.
#pragma once

#include "races.h"
#include "warp.h"

namespace torchrec_dyn::ptx {

// Bytes on both sides of shared and local memory that belong to nobody: a generic address there is an overrun.
constexpr size_t kMargin = 256;

// The rest of the checks of global and generic addresses: rare ones, and those that only some runs ask for.
void check_further(const Warp& warp, const Instruction& instruction, int lane, uintptr_t address, size_t bytes,
                   bool is_write);
[[noreturn]] void fail_misaligned(const Warp& warp, const Instruction& instruction, int lane, uint64_t address,
                                  size_t bytes);
[[noreturn]] void fail_outside(const Warp& warp, const Instruction& instruction, int lane, uint64_t address,
                               size_t bytes, const char* space, size_t end);
[[noreturn]] void fail_no_address(const Warp& warp, const Instruction& instruction, int lane, uint64_t address);

inline uint8_t* within(const Warp& warp, const Instruction& instruction, int lane, uint64_t address, size_t bytes,
                       const char* space, uint8_t* memory, size_t end) {
  if (address > end || bytes > end - address) fail_outside(warp, instruction, lane, address, bytes, space, end);
  return memory + address;
}

// Where `bytes` at the address of a lane are. `bytes` is a power of two.
inline uint8_t* accessed(Warp& warp, const Instruction& instruction, int lane, uint64_t base, size_t bytes,
                         bool is_write) {
  GridState& grid = *warp.block->grid;
  uint64_t address = base + static_cast<uint64_t>(instruction.offset);
  if (instruction.space == Space::kShared) address = static_cast<uint32_t>(address);
  if ((address & (bytes - 1)) != 0) fail_misaligned(warp, instruction, lane, address, bytes);
  switch (instruction.space) {
    case Space::kShared: {
      uint8_t* memory =
          within(warp, instruction, lane, address, bytes, "shared memory", warp.block->shared, grid.shared_bytes);
      if (grid.races != nullptr)
        note_access(warp, instruction, lane, reinterpret_cast<uintptr_t>(memory), bytes, is_write);
      return memory;
    }
    case Space::kLocal: {
      const size_t end = grid.kernel->local_bytes;
      return within(warp, instruction, lane, address, bytes, "local memory",
                    warp.local + static_cast<size_t>(lane) * end, end);
    }
    case Space::kParameter:
      return within(warp, instruction, lane, address, bytes, "the parameters", grid.parameters,
                    grid.kernel->parameter_bytes);
    default:
      break;
  }
  // The first 64 KiB are never mapped; an address of a program has 47 bits.
  if (address - 65536 >= (uint64_t{1} << 47) - 65536) fail_no_address(warp, instruction, lane, address);
  if (grid.is_checked_further || address - grid.stack_begin < grid.stack_end - grid.stack_begin ||
      address - grid.private_begin < grid.private_end - grid.private_begin)
    check_further(warp, instruction, lane, address, bytes, is_write);
  grid.access.lane = lane;
  grid.access.address = address;
  return reinterpret_cast<uint8_t*>(address);
}

// Before the accesses of an instruction: what the handler of SIGSEGV reports.
inline void begin_access(Warp& warp, const Instruction& instruction, size_t bytes) {
  Access& access = warp.block->grid->access;
  access.warp = &warp;
  access.instruction = &instruction;
  access.bytes = bytes;
}
inline void end_access(Warp& warp) { warp.block->grid->access.warp = nullptr; }

// Runs body(lane) for each of the lanes. If several write one address, the last one's value stays, and PTX does not say
// who is the last.
template <typename Body>
inline void for_lanes_in_turn(const Warp& warp, uint32_t lanes, const Body& body) {
  if (!warp.is_descending) return for_lanes(lanes, body);
  while (lanes != 0) {
    const int lane = kLanes - 1 - std::countl_zero(lanes);
    lanes &= ~(1u << lane);
    body(lane);
  }
}

}  // namespace torchrec_dyn::ptx
