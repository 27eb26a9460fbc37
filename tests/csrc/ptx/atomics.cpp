// PTX ISA, "Parallel Synchronization and Communication Instructions: atom, red". Warps take turns between instructions,
// so each access is atomic.
#include <algorithm>
#include <cstring>

#include "memory_access.h"
#include "opcode.h"

namespace torchrec_dyn::ptx {
namespace {

template <typename T, Reduction reduction>
T reduced(T old, T b, T c) {
  using U = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  if constexpr (reduction == Reduction::kAdd) {
    if constexpr (std::is_floating_point_v<T>) return old + b;
    return static_cast<T>(static_cast<U>(old) + static_cast<U>(b));
  } else if constexpr (reduction == Reduction::kMin) {
    return std::min(old, b);
  } else if constexpr (reduction == Reduction::kMax) {
    return std::max(old, b);
  } else if constexpr (reduction == Reduction::kExchange) {
    return b;
  } else if constexpr (reduction == Reduction::kCompareExchange) {
    return old == b ? c : old;
  } else if constexpr (reduction == Reduction::kInc) {
    return old >= b ? 0 : old + 1;
  } else if constexpr (reduction == Reduction::kDec) {
    return old == 0 || old > b ? b : old - 1;
  } else if constexpr (reduction == Reduction::kAnd) {
    return old & b;
  } else if constexpr (reduction == Reduction::kOr) {
    return old | b;
  } else {
    return old ^ b;
  }
}

template <typename T, Reduction reduction>
void apply(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t *base = read(warp, instruction.source[0]), *b = read(warp, instruction.source[1]);
  const uint64_t* c = instruction.sources > 2 ? read(warp, instruction.source[2]) : b;
  const bool has_result = instruction.destinations != 0;
  begin_access(warp, instruction, sizeof(T));
  for_lanes_in_turn(warp, lanes, [&](int lane) {
    uint8_t* memory = accessed(warp, instruction, lane, base[lane], sizeof(T), true);
    T old;
    std::memcpy(&old, memory, sizeof(T));
    const uint64_t after = word_of(reduced<T, reduction>(old, as<T>(b[lane]), as<T>(c[lane])));
    std::memcpy(memory, &after, sizeof(T));  // little endian: the low bytes
    if (has_result) written(warp, instruction.destination[0])[lane] = word_of(old);
  });
  end_access(warp);
}

template <typename T>
Handler integer_handler_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::kAdd:
      return apply<T, Reduction::kAdd>;
    case Reduction::kMin:
      return apply<T, Reduction::kMin>;
    case Reduction::kMax:
      return apply<T, Reduction::kMax>;
    case Reduction::kAnd:
      return apply<T, Reduction::kAnd>;
    case Reduction::kOr:
      return apply<T, Reduction::kOr>;
    case Reduction::kXor:
      return apply<T, Reduction::kXor>;
    case Reduction::kExchange:
      return apply<T, Reduction::kExchange>;
    case Reduction::kCompareExchange:
      return apply<T, Reduction::kCompareExchange>;
    case Reduction::kInc:
      return std::is_same_v<T, uint32_t> ? apply<T, Reduction::kInc> : nullptr;
    case Reduction::kDec:
      return std::is_same_v<T, uint32_t> ? apply<T, Reduction::kDec> : nullptr;
    default:
      return nullptr;
  }
}

}  // namespace

Handler atomic_handler(Type type, Reduction reduction) {
  const bool adds = reduction == Reduction::kAdd;
  if (type == Type::kF32) return adds ? apply<float, Reduction::kAdd> : nullptr;
  if (type == Type::kF64) return adds ? apply<double, Reduction::kAdd> : nullptr;
  if (bits_of(type) < 32) return nullptr;
  switch (type) {
    case Type::kS32:
      return integer_handler_of<int32_t>(reduction);
    case Type::kS64:
      return integer_handler_of<int64_t>(reduction);
    default:
      return bits_of(type) == 64 ? integer_handler_of<uint64_t>(reduction) : integer_handler_of<uint32_t>(reduction);
  }
}

}  // namespace torchrec_dyn::ptx
