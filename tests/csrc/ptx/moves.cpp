// PTX ISA, "Data Movement and Conversion Instructions: mov, cvta".
#include "opcode.h"
#include "warp.h"

namespace torchrec_dyn::ptx {
namespace {

void copy(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint64_t* out = written(warp, instruction.destination[0]);
  const uint64_t* a = read(warp, instruction.source[0]);
  for_lanes(lanes, [=](int lane) { out[lane] = a[lane]; });
}

uint64_t low_bits(uint64_t word, int bits) { return bits == 64 ? word : word & ((uint64_t{1} << bits) - 1); }

// The first element is the low part.
void unpack(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const int bits = instruction.part_bits;
  for_lanes(lanes, [&](int lane) {
    const uint64_t word = read(warp, instruction.source[0])[lane];
    for (int i = 0; i < instruction.destinations; ++i)
      written(warp, instruction.destination[i])[lane] = low_bits(word >> (i * bits), bits);
  });
}

void pack(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const int bits = instruction.part_bits;
  for_lanes(lanes, [&](int lane) {
    uint64_t word = 0;
    for (int i = 0; i < instruction.sources; ++i)
      word |= low_bits(read(warp, instruction.source[i])[lane], bits) << (i * bits);
    written(warp, instruction.destination[0])[lane] = word;
  });
}

// Where the space begins for a lane. Generic addresses are addresses of the host.
uint64_t base_of(const Warp& warp, Space space, int lane) {
  const GridState& grid = *warp.block->grid;
  const auto address = [](const uint8_t* memory) { return reinterpret_cast<uint64_t>(memory); };
  switch (space) {
    case Space::kShared:
      return address(warp.block->shared);
    case Space::kLocal:
      return address(warp.local) + static_cast<uint64_t>(lane) * grid.kernel->local_bytes;
    case Space::kParameter:
      return address(grid.parameters);
    default:
      return 0;
  }
}

void to_generic(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint64_t* out = written(warp, instruction.destination[0]);
  const uint64_t* a = read(warp, instruction.source[0]);
  for_lanes(lanes, [&](int lane) { out[lane] = base_of(warp, instruction.space, lane) + a[lane]; });
}

void from_generic(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint64_t* out = written(warp, instruction.destination[0]);
  const uint64_t* a = read(warp, instruction.source[0]);
  for_lanes(lanes, [&](int lane) { out[lane] = a[lane] - base_of(warp, instruction.space, lane); });
}

}  // namespace

Handler mov_handler(Type type, int destinations, int sources) {
  if (bits_of(type) < 16) return nullptr;
  if (destinations > 1) return unpack;
  return sources > 1 ? pack : copy;
}

Handler cvta_handler(Opcode& opcode) {
  if (opcode.type() != Type::kU64) return nullptr;
  return opcode.has("to") ? from_generic : to_generic;
}

}  // namespace torchrec_dyn::ptx
