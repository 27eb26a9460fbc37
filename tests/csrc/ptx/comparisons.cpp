// PTX ISA, "Comparison and Selection Instructions", and logic of predicates. A predicate is a word with one bit a lane.
#include <cmath>

#include "elementwise.h"

namespace torchrec_dyn::ptx {
namespace {

uint32_t combined(Combination combination, uint32_t a, uint32_t b) {
  switch (combination) {
    case Combination::kAnd:
      return a & b;
    case Combination::kOr:
      return a | b;
    case Combination::kXor:
      return a ^ b;
    default:
      return a;
  }
}

template <typename T, typename Compare>
Handler compared(Compare) {
  return +[](Warp& warp, const Instruction& instruction, uint32_t lanes) {
    const uint64_t *a = read(warp, instruction.source[0]), *b = read(warp, instruction.source[1]);
    uint32_t bits = 0;
    for_lanes(lanes, [a, b, &bits](int lane) {
      bits |= static_cast<uint32_t>(Compare{}(as<T>(a[lane]), as<T>(b[lane]))) << lane;
    });
    uint32_t opposite = ~bits;
    if (instruction.combination != Combination::kNone) {
      const uint32_t third = read(warp, instruction.condition[0]);
      bits = combined(instruction.combination, bits, third);
      opposite = combined(instruction.combination, opposite, third);
    }
    write(warp, instruction.result[0], lanes, bits);
    if (instruction.result[1].exists()) write(warp, instruction.result[1], lanes, opposite);
  };
}

// lo, ls, hi and hs are the names of lt, le, gt and ge for unsigned numbers.
template <typename T>
Handler ordered_handler(Opcode& opcode) {
  if (opcode.has("eq")) return compared<T>([](T a, T b) { return a == b; });
  if (opcode.has("ne")) return compared<T>([](T a, T b) { return a < b || a > b; });  // false for NaN
  if (opcode.has_any({"lt", "lo"})) return compared<T>([](T a, T b) { return a < b; });
  if (opcode.has_any({"le", "ls"})) return compared<T>([](T a, T b) { return a <= b; });
  if (opcode.has_any({"gt", "hi"})) return compared<T>([](T a, T b) { return a > b; });
  if (opcode.has_any({"ge", "hs"})) return compared<T>([](T a, T b) { return a >= b; });
  return nullptr;
}

// True as well if an operand is NaN.
template <typename T>
Handler unordered_handler(Opcode& opcode) {
  if (opcode.has("equ")) return compared<T>([](T a, T b) { return !(a < b || a > b); });
  if (opcode.has("neu")) return compared<T>([](T a, T b) { return a != b; });
  if (opcode.has("ltu")) return compared<T>([](T a, T b) { return !(a >= b); });
  if (opcode.has("leu")) return compared<T>([](T a, T b) { return !(a > b); });
  if (opcode.has("gtu")) return compared<T>([](T a, T b) { return !(a <= b); });
  if (opcode.has("geu")) return compared<T>([](T a, T b) { return !(a < b); });
  if (opcode.has("num")) return compared<T>([](T a, T b) { return !std::isunordered(a, b); });
  if (opcode.has("nan")) return compared<T>([](T a, T b) { return std::isunordered(a, b); });
  return nullptr;
}

template <typename T>
Handler float_compared(Opcode& opcode) {
  const Handler ordered = ordered_handler<T>(opcode);
  return ordered != nullptr ? ordered : unordered_handler<T>(opcode);
}

template <Combination combination>
void combine(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  write(warp, instruction.result[0], lanes,
        combined(combination, read(warp, instruction.condition[0]), read(warp, instruction.condition[1])));
}

template <uint32_t flipped>
void copy_predicate(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  write(warp, instruction.result[0], lanes, read(warp, instruction.condition[0]) ^ flipped);
}

}  // namespace

Handler setp_handler(Opcode& opcode, Instruction& instruction) {
  const int combination = opcode.one_of({"and", "or", "xor"});
  if (combination >= 0) instruction.combination = static_cast<Combination>(combination + 1);
  const Type type = opcode.type();
  if (type == Type::kF32) return float_compared<float>(opcode);
  if (type == Type::kF64) return float_compared<double>(opcode);
  return for_integer(type, [&]<typename T>() { return ordered_handler<T>(opcode); });
}

Handler selp_handler(Opcode& opcode) {
  if (bits_of(opcode.type()) < 16) return nullptr;
  return +[](Warp& warp, const Instruction& instruction, uint32_t lanes) {
    uint64_t* out = written(warp, instruction.destination[0]);
    const uint64_t *a = read(warp, instruction.source[0]), *b = read(warp, instruction.source[1]);
    const uint32_t chosen = read(warp, instruction.condition[0]);
    for_lanes(lanes, [=](int lane) { out[lane] = has_lane(chosen, lane) ? a[lane] : b[lane]; });
  };
}

Handler predicate_handler(Opcode& opcode) {
  if (opcode.type() != Type::kPredicate) return nullptr;
  if (opcode.is("and")) return combine<Combination::kAnd>;
  if (opcode.is("or")) return combine<Combination::kOr>;
  if (opcode.is("xor")) return combine<Combination::kXor>;
  if (opcode.is("not")) return copy_predicate<kAllLanes>;
  if (opcode.is("mov")) return copy_predicate<0>;
  return nullptr;
}

}  // namespace torchrec_dyn::ptx
