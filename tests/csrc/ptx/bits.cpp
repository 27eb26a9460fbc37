// PTX ISA, the bit functions of "Integer Arithmetic Instructions", "Logic and Shift Instructions", and prmt.
#include <algorithm>

#include "elementwise.h"

namespace torchrec_dyn::ptx {
namespace {

template <typename U>
constexpr uint32_t kBits = 8 * sizeof(U);

// Ones in the low bits.
template <typename U>
U low_ones(uint32_t count) {
  return count >= kBits<U> ? ~U{0} : static_cast<U>((U{1} << count) - 1);
}

template <typename U>
U reversed(U a) {
  U result = 0;
  for (uint32_t bit = 0; bit < kBits<U>; ++bit, a >>= 1) result = static_cast<U>(result << 1) | (a & 1);
  return result;
}

// Field of b at `position` becomes the low bits of a.
template <typename U>
U inserted(U a, U b, uint32_t position, uint32_t length) {
  position &= 0xFF;
  if (position >= kBits<U>) return b;
  const U field = static_cast<U>(low_ones<U>(length & 0xFF) << position);
  return (b & ~field) | (static_cast<U>(a << position) & field);
}

// The field of a; bits above it are copies of its sign if T is signed, and so is what the field has beyond the word.
template <typename T>
T extracted(T a, uint32_t position, uint32_t length) {
  using U = std::make_unsigned_t<T>;
  position &= 0xFF, length &= 0xFF;
  if (length == 0) return 0;
  const uint32_t last = std::min(position + length - 1, kBits<U> - 1);
  const bool is_negative = std::is_signed_v<T> && (static_cast<U>(a) >> last & 1) != 0;
  const uint32_t taken = position >= kBits<U> ? 0 : std::min(length, kBits<U> - position);
  const U field = taken == 0 ? 0 : static_cast<U>(static_cast<U>(a) >> position) & low_ones<U>(taken);
  return static_cast<T>(is_negative ? field | ~low_ones<U>(taken) : field);
}

// Place of the highest bit that differs from the sign, or the shift that brings it to the top; all ones: there is none.
template <typename T, bool is_shift>
uint32_t highest_bit(T a) {
  using U = std::make_unsigned_t<T>;
  const U word = static_cast<U>(a < 0 ? ~a : a);
  if (word == 0) return ~0u;
  const auto zeros = static_cast<uint32_t>(std::countl_zero(word));
  return is_shift ? zeros : kBits<U> - 1 - zeros;
}

// Each of four bytes is one of the eight of b:a, or eight copies of its highest bit.
uint32_t permuted(uint32_t a, uint32_t b, uint32_t selectors) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> (4 * i) & 15;
    auto byte = static_cast<uint32_t>(bytes >> (8 * (selector & 7)) & 0xFF);
    if ((selector & 8) != 0) byte = (byte & 0x80) != 0 ? 0xFF : 0;
    result |= byte << (8 * i);
  }
  return result;
}

// The high word of b:a shifted to the left, or the low word of b:a shifted to the right.
template <bool is_left, bool is_clamped>
uint32_t funnel_shifted(uint32_t a, uint32_t b, uint32_t amount) {
  const uint64_t both = uint64_t{b} << 32 | a;
  const uint32_t n = is_clamped ? std::min(amount, 32u) : amount & 31;
  return static_cast<uint32_t>(is_left ? both << n >> 32 : both >> n);
}

Handler funnel_handler(Opcode& opcode) {
  using U = uint32_t;
  const bool is_left = opcode.has("l"), is_clamped = opcode.has("clamp");
  if (is_left == opcode.has("r") || is_clamped == opcode.has("wrap")) return nullptr;
  if (is_left)
    return is_clamped ? ternary<U>([](U a, U b, U c) { return funnel_shifted<true, true>(a, b, c); })
                      : ternary<U>([](U a, U b, U c) { return funnel_shifted<true, false>(a, b, c); });
  return is_clamped ? ternary<U>([](U a, U b, U c) { return funnel_shifted<false, true>(a, b, c); })
                    : ternary<U>([](U a, U b, U c) { return funnel_shifted<false, false>(a, b, c); });
}

// `width` ones from bit `begin` on, as far as they are below bit 32.
uint32_t mask_of(uint32_t begin, uint32_t width) {
  const uint64_t ones = width < 32 ? (uint64_t{1} << width) - 1 : 0xFFFFFFFFu;
  return begin < 32 ? static_cast<uint32_t>(ones << begin) : 0;
}

Handler mask_handler(Opcode& opcode) {
  using U = uint32_t;
  const bool is_clamped = opcode.has("clamp");
  if (is_clamped == opcode.has("wrap")) return nullptr;
  return is_clamped ? binary<U>([](U begin, U width) { return mask_of(begin, width); })
                    : binary<U>([](U begin, U width) { return mask_of(begin & 31, width & 31); });
}

// Bit k of the table is the result for the bits k of (a, b, c).
uint32_t looked_up(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (uint32_t k = 0; k < 8; ++k)
    if ((table >> k & 1) != 0) result |= ((k & 4) != 0 ? a : ~a) & ((k & 2) != 0 ? b : ~b) & ((k & 1) != 0 ? c : ~c);
  return result;
}

template <typename T>
Handler logic_handler(const Opcode& opcode) {
  if (opcode.is("and")) return binary<T>([](T a, T b) { return static_cast<T>(a & b); });
  if (opcode.is("or")) return binary<T>([](T a, T b) { return static_cast<T>(a | b); });
  if (opcode.is("xor")) return binary<T>([](T a, T b) { return static_cast<T>(a ^ b); });
  if (opcode.is("not")) return unary<T>([](T a) { return static_cast<T>(~a); });
  if (opcode.is("cnot")) return unary<T>([](T a) { return static_cast<T>(a == 0); });
  return nullptr;
}

template <typename T>
Handler wide_handler(Opcode& opcode) {
  using U = std::make_unsigned_t<T>;
  if (opcode.is("popc")) return unary<U>([](U a) { return static_cast<uint32_t>(std::popcount(a)); });
  if (opcode.is("clz")) return unary<U>([](U a) { return static_cast<uint32_t>(std::countl_zero(a)); });
  if (opcode.is("brev")) return unary<U>([](U a) { return reversed(a); });
  if (opcode.is("bfind"))
    return opcode.has("shiftamt") ? unary<T>([](T a) { return highest_bit<T, true>(a); })
                                  : unary<T>([](T a) { return highest_bit<T, false>(a); });
  if (opcode.is("bfi")) return quaternary<U>([](U a, U b, uint32_t c, uint32_t d) { return inserted(a, b, c, d); });
  if (opcode.is("bfe"))
    return +[](Warp& warp, const Instruction& instruction, uint32_t lanes) {
      uint64_t* out = written(warp, instruction.destination[0]);
      const uint64_t *a = read(warp, instruction.source[0]), *b = read(warp, instruction.source[1]);
      const uint64_t* c = read(warp, instruction.source[2]);
      for_lanes(lanes, [=](int lane) {
        out[lane] = word_of(extracted(as<T>(a[lane]), static_cast<uint32_t>(b[lane]), static_cast<uint32_t>(c[lane])));
      });
    };
  return nullptr;
}

}  // namespace

Handler bit_handler(Opcode& opcode) {
  using U = uint32_t;
  const Type type = opcode.type();
  if (opcode.is("shf")) return bits_of(type) == 32 ? funnel_handler(opcode) : nullptr;
  if (opcode.is("bmsk")) return bits_of(type) == 32 ? mask_handler(opcode) : nullptr;
  if (opcode.is("prmt"))
    return bits_of(type) == 32 ? ternary<U>([](U a, U b, U c) { return permuted(a, b, c); }) : nullptr;
  if (opcode.is("lop3"))
    return bits_of(type) == 32 ? quaternary<U>([](U a, U b, U c, U table) { return looked_up(a, b, c, table); })
                               : nullptr;
  return for_integer(type, [&]<typename T>() -> Handler {
    if (const Handler logic = logic_handler<T>(opcode)) return logic;
    if constexpr (sizeof(T) >= 4) return wide_handler<T>(opcode);
    return nullptr;
  });
}

}  // namespace torchrec_dyn::ptx
