// PTX ISA, "Data Movement and Conversion Instructions: ld, st", and what a wrong address is told.
#include <cstring>

#include "memory_access.h"
#include "opcode.h"
#include "range_check.h"

namespace torchrec_dyn::ptx {
namespace {

// T: as memory holds an element. Signed ones are extended to the width of the register.
template <typename T>
void load(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t* base = read(warp, instruction.source[0]);
  const size_t elements = instruction.vector, bytes = elements * sizeof(T);
  begin_access(warp, instruction, bytes);
  for_lanes(lanes, [&](int lane) {
    const uint8_t* memory = accessed(warp, instruction, lane, base[lane], bytes, false);
    T taken[8];  // before a destination is written: it may be the base
    for (size_t i = 0; i < elements; ++i) std::memcpy(taken + i, memory + i * sizeof(T), sizeof(T));
    for (size_t i = 0; i < elements; ++i) written(warp, instruction.destination[i])[lane] = word_of(taken[i]);
  });
  end_access(warp);
}

template <typename T>
void store(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t* base = read(warp, instruction.source[0]);
  const size_t elements = instruction.vector, bytes = elements * sizeof(T);
  begin_access(warp, instruction, bytes);
  for_lanes_in_turn(warp, lanes, [&](int lane) {
    uint8_t* memory = accessed(warp, instruction, lane, base[lane], bytes, true);
    for (size_t i = 0; i < elements; ++i) {
      const auto element = static_cast<T>(read(warp, instruction.source[1 + i])[lane]);
      std::memcpy(memory + i * sizeof(T), &element, sizeof(T));
    }
  });
  end_access(warp);
}

bool is_inside(uintptr_t address, size_t bytes, const uint8_t* memory, size_t size) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  return memory != nullptr && address >= begin && address + bytes <= begin + size;
}

// Shared memory of the own block and local memory of the own lane have generic addresses.
bool is_own(const Warp& warp, const Instruction& instruction, int lane, uintptr_t address, size_t bytes) {
  const GridState& grid = *warp.block->grid;
  if (instruction.space != Space::kGeneric) return false;
  const size_t local_bytes = grid.kernel->local_bytes;
  return is_inside(address, bytes, warp.block->shared, grid.shared_bytes) ||
         is_inside(address, bytes, warp.local + static_cast<size_t>(lane) * local_bytes, local_bytes);
}

}  // namespace

Handler load_handler(Type type) {
  switch (type) {
    case Type::kB8:
    case Type::kU8:
      return load<uint8_t>;
    case Type::kS8:
      return load<int8_t>;
    case Type::kB16:
    case Type::kU16:
      return load<uint16_t>;
    case Type::kS16:
      return load<int16_t>;
    case Type::kB32:
    case Type::kU32:
    case Type::kF32:
      return load<uint32_t>;
    case Type::kS32:
      return load<int32_t>;
    case Type::kB64:
    case Type::kU64:
    case Type::kS64:
    case Type::kF64:
      return load<uint64_t>;
    default:
      return nullptr;
  }
}

Handler store_handler(Type type) {
  switch (bits_of(type)) {
    case 8:
      return store<uint8_t>;
    case 16:
      return store<uint16_t>;
    case 32:
      return store<uint32_t>;
    case 64:
      return store<uint64_t>;
    default:
      return nullptr;
  }
}

void check_further(const Warp& warp, const Instruction& instruction, int lane, uintptr_t address, size_t bytes,
                   bool is_write) {
  const GridState& grid = *warp.block->grid;
  if (address - grid.stack_begin < grid.stack_end - grid.stack_begin)
    fail(700, warp, instruction, lane,
         "expected an address of the device, got " + hexadecimal(address) + " on the stack of the host");
  const bool is_private = address - grid.private_begin < grid.private_end - grid.private_begin;
  if (is_private) {
    if (!is_own(warp, instruction, lane, address, bytes))
      fail(700, warp, instruction, lane,
           "expected an address inside the block's shared or the lane's local memory, got " + hexadecimal(address) +
               " beside them");
  } else if (const char* wrong = wrong_range(address, bytes, is_write)) {
    fail(700, warp, instruction, lane,
         std::string("expected an address of the device, got ") + hexadecimal(address) + ", " +
             (is_write ? "written: " : "read: ") + wrong);
  }
  if (grid.races != nullptr) note_access(warp, instruction, lane, address, bytes, is_write);
}

void fail_misaligned(const Warp& warp, const Instruction& instruction, int lane, uint64_t address, size_t bytes) {
  fail(716, warp, instruction, lane,
       "expected an address that is a multiple of " + std::to_string(bytes) + ", got " + hexadecimal(address));
}

void fail_outside(const Warp& warp, const Instruction& instruction, int lane, uint64_t address, size_t bytes,
                  const char* space, size_t end) {
  fail(700, warp, instruction, lane,
       "expected " + std::to_string(bytes) + " bytes within the " + std::to_string(end) + " of " + space +
           ", got offset " + hexadecimal(address));
}

void fail_no_address(const Warp& warp, const Instruction& instruction, int lane, uint64_t address) {
  fail(700, warp, instruction, lane, "expected an address of the device, got " + hexadecimal(address));
}

}  // namespace torchrec_dyn::ptx
