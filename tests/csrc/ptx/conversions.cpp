// PTX ISA, "Data Movement and Conversion Instructions: cvt".
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "opcode.h"
#include "warp.h"

namespace torchrec_dyn::ptx {
namespace {

// Formats of 16 bits; their numbers are floats here.
struct Half {};
struct BFloat {};

template <typename T>
constexpr bool kIsFloat = std::is_floating_point_v<T> || std::is_same_v<T, Half> || std::is_same_v<T, BFloat>;

template <typename T>
auto number_of(uint64_t word) {
  if constexpr (std::is_same_v<T, Half>) {
    return static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(word)));
  } else if constexpr (std::is_same_v<T, BFloat>) {
    return std::bit_cast<float>(static_cast<uint32_t>(word) << 16);
  } else {
    return as<T>(word);
  }
}

// The upper half of a float, rounded to nearest even. "NaN results are 0x7FFF."
uint64_t bfloat_word(float number) {
  if (std::isnan(number)) return 0x7FFF;
  const auto bits = std::bit_cast<uint32_t>(number);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

template <typename S>
uint64_t half_word(S number) {
  if (std::isnan(number)) return 0x7FFF;
  return std::bit_cast<uint16_t>(static_cast<_Float16>(number));
}

template <typename S>
S rounded(S number, Rounding rounding) {
  switch (rounding) {
    case Rounding::kZero:
      return std::trunc(number);
    case Rounding::kDown:
      return std::floor(number);
    case Rounding::kUp:
      return std::ceil(number);
    default:
      return std::nearbyint(number);
  }
}

// Numbers outside of the range become its ends. NaN is 0 if both types have at most 32 bits, else the top bit alone.
template <typename D, typename S>
D integer_of(S number, Rounding rounding) {
  if (std::isnan(number)) {
    if (sizeof(S) < 8 && sizeof(D) < 8) return 0;
    return static_cast<D>(uint64_t{1} << (8 * sizeof(D) - 1));
  }
  const S whole = rounded(number, rounding);
  if (whole >= std::ldexp(S{1}, std::numeric_limits<D>::digits)) return std::numeric_limits<D>::max();
  if (whole <= static_cast<S>(std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
  return static_cast<D>(whole);
}

template <typename D, typename S>
D clamped(S number) {
  if (std::cmp_less(number, std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
  if (std::cmp_greater(number, std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
  return static_cast<D>(number);
}

template <typename D, typename S>
uint64_t converted(uint64_t word, const Instruction& instruction) {
  auto number = number_of<S>(word);
  if constexpr (std::is_integral_v<D> && std::is_integral_v<S>) {
    return word_of(instruction.saturates ? clamped<D>(number) : static_cast<D>(number));
  } else if constexpr (std::is_integral_v<D>) {
    return word_of(integer_of<D>(number, instruction.rounding));
  } else {
    if constexpr (kIsFloat<S>) {
      if (instruction.rounds_to_integer) number = rounded(number, instruction.rounding);
      if (instruction.saturates) number = number > 0 ? std::min(number, decltype(number){1}) : 0;  // NaN becomes +0
    }
    if constexpr (std::is_same_v<D, Half>) {
      return half_word(number);
    } else if constexpr (std::is_same_v<D, BFloat>) {
      return bfloat_word(number);
    } else {
      return word_of(static_cast<D>(number));
    }
  }
}

template <typename D, typename S>
void convert(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint64_t* out = written(warp, instruction.destination[0]);
  const uint64_t* a = read(warp, instruction.source[0]);
  for_lanes(lanes, [=, &instruction](int lane) { out[lane] = converted<D, S>(a[lane], instruction); });
}

// cvt.rn.f16x2.f32: a is the upper half.
template <typename D>
void convert_two(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint64_t* out = written(warp, instruction.destination[0]);
  const uint64_t *a = read(warp, instruction.source[0]), *b = read(warp, instruction.source[1]);
  for_lanes(lanes, [=, &instruction](int lane) {
    out[lane] = converted<D, float>(a[lane], instruction) << 16 | converted<D, float>(b[lane], instruction);
  });
}

template <typename S>
Handler handler_to(Type type) {
  switch (type) {
    case Type::kU8:
      return convert<uint8_t, S>;
    case Type::kS8:
      return convert<int8_t, S>;
    case Type::kU16:
      return convert<uint16_t, S>;
    case Type::kS16:
      return convert<int16_t, S>;
    case Type::kU32:
      return convert<uint32_t, S>;
    case Type::kS32:
      return convert<int32_t, S>;
    case Type::kU64:
      return convert<uint64_t, S>;
    case Type::kS64:
      return convert<int64_t, S>;
    case Type::kF32:
      return convert<float, S>;
    case Type::kF64:
      return convert<double, S>;
    // An integer or a double would be rounded twice.
    case Type::kF16:
      if constexpr (kIsFloat<S>) return convert<Half, S>;
      return nullptr;
    case Type::kBF16:
      if constexpr (std::is_same_v<S, float>) return convert<BFloat, S>;
      return nullptr;
    default:
      return nullptr;
  }
}

Handler handler_between(Type to, Type from) {
  switch (from) {
    case Type::kU8:
      return handler_to<uint8_t>(to);
    case Type::kS8:
      return handler_to<int8_t>(to);
    case Type::kU16:
      return handler_to<uint16_t>(to);
    case Type::kS16:
      return handler_to<int16_t>(to);
    case Type::kU32:
      return handler_to<uint32_t>(to);
    case Type::kS32:
      return handler_to<int32_t>(to);
    case Type::kU64:
      return handler_to<uint64_t>(to);
    case Type::kS64:
      return handler_to<int64_t>(to);
    case Type::kF16:
      return handler_to<Half>(to);
    case Type::kBF16:
      return handler_to<BFloat>(to);
    case Type::kF32:
      return handler_to<float>(to);
    case Type::kF64:
      return handler_to<double>(to);
    default:
      return nullptr;
  }
}

}  // namespace

Handler cvt_handler(Opcode& opcode, Instruction& instruction) {
  const int to_integer = opcode.one_of({"rni", "rzi", "rmi", "rpi"});
  instruction.rounds_to_integer = to_integer >= 0;
  if (to_integer > 0) instruction.rounding = static_cast<Rounding>(to_integer);
  instruction.saturates = opcode.has("sat");
  opcode.ignore({"rn"});
  const Type from = opcode.type();
  if (from == Type::kF32 && opcode.has("f16x2")) return convert_two<Half>;
  if (from == Type::kF32 && opcode.has("bf16x2")) return convert_two<BFloat>;
  return handler_between(opcode.type(1), from);
}

}  // namespace torchrec_dyn::ptx
