// A kernel as the emulator runs it: instructions whose operands are rows of registers.
//
// A register of a warp is a row of 32 words of 64 bits, one a lane, whatever its declared width. Who reads a register
// takes the low bits that the type of the instruction asks for, so the bits above them may hold anything. (PTX ISA,
// "Operand Size Exceeding Instruction-Type Size", lets ld, st and cvt use wider registers; signed results are stored
// sign-extended for it.) Constants are rows too. A predicate is one word of 32 bits, one a lane.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "emulator.h"

namespace torchrec_dyn::ptx {

constexpr int kLanes = 32;
// Of shared memory that a launch adds to the kernel's own.
constexpr size_t kAddedSharedAlignment = 16;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

struct Warp;
struct Instruction;
using Handler = void (*)(Warp& warp, const Instruction& instruction, uint32_t lanes);

// Row of a register if not negative, else of a constant: ~row.
using Operand = int32_t;
constexpr Operand kNoOperand = INT32_MIN;

// Numbers of predicates that every kernel has. The carry is CC.CF of "Extended-Precision Integer Arithmetic
// Instructions".
constexpr int kNever = 0;
constexpr int kAlways = 1;
constexpr int kCarry = 2;

// A predicate as an operand of an instruction: `!` negates it.
struct Predicate {
  int number = kNoOperand;
  uint32_t negated = 0;  // kAllLanes: `!`
  bool exists() const { return number != kNoOperand; }
};

enum class Control : uint8_t {
  kPlain,     // the handler, then the next instruction
  kBranch,    // to `target`
  kExit,      // ret and exit
  kBarrier,   // bar.sync and bar.red: waits for the threads of the block
  kWarpSync,  // *.sync: waits for the lanes of the member mask, then the handler
  kYield,     // nanosleep, and fences, which loops that wait for other blocks have: other warps go first
};

enum class Space : uint8_t { kGeneric, kGlobal, kShared, kLocal, kParameter, kConstant };

// Of the memory consistency model, as far as races need it. Volatile accesses count as relaxed ones.
enum class Order : uint8_t { kWeak, kRelaxed, kAcquire, kRelease, kAcquireRelease };

enum class Reduction : uint8_t {
  kNone,
  kAdd,
  kMin,
  kMax,
  kAnd,
  kOr,
  kXor,
  kExchange,
  kCompareExchange,
  kInc,
  kDec,
  kCount
};

// Which lane shfl reads, what vote returns, how setp uses its third operand.
enum class Shuffle : uint8_t { kUp, kDown, kButterfly, kIndex };
enum class Vote : uint8_t { kBallot, kAny, kAll, kUniform };
enum class Combination : uint8_t { kNone, kAnd, kOr, kXor };
enum class Rounding : uint8_t { kNearest, kZero, kDown, kUp };  // to an integer

struct Instruction {
  Handler run = nullptr;
  Control control = Control::kPlain;
  bool is_meeting_point = false;  // lanes of several branches may be here: a label, or after a branch of some lanes
  bool is_signed = false;         // redux
  bool is_for_block = false;      // fences and strong accesses of scope .cta
  bool is_aligned = false;        // of a barrier: all lanes of a warp wait at one instruction
  bool is_warp_barrier = false;   // bar.warp.sync: lanes may be at different instructions

  Predicate guard;
  uint8_t destinations = 0, sources = 0;
  Operand destination[8] = {}, source[8] = {};
  Predicate result[2];     // predicates that are written: setp p|q, the p of shfl
  Predicate condition[2];  // predicates that are read: selp, vote, the third operand of setp
  Operand member_mask = kNoOperand;

  int64_t offset = 0;     // of an address
  uint8_t vector = 1;     // elements of ld and st
  uint8_t part_bits = 0;  // of each element of mov with a {vector}
  Space space = Space::kGeneric;
  Order order = Order::kWeak;
  Reduction reduction = Reduction::kNone;
  bool is_atomic = false;
  Shuffle shuffle = Shuffle::kUp;
  Vote vote = Vote::kBallot;
  Combination combination = Combination::kNone;
  Rounding rounding = Rounding::kNearest;
  bool saturates = false;
  bool rounds_to_integer = false;

  uint32_t target = 0;
  int line = 0;
  std::string text;
};

enum class Special : uint8_t {
  kThreadX,
  kThreadY,
  kThreadZ,
  kBlockSizeX,
  kBlockSizeY,
  kBlockSizeZ,
  kBlockX,
  kBlockY,
  kBlockZ,
  kGridSizeX,
  kGridSizeY,
  kGridSizeZ,
  kLane,
  kWarp,
  kWarps,

  kMaskEqual,
  kMaskLess,
  kMaskLessEqual,
  kMaskGreater,
  kMaskGreaterEqual,
};

struct Parameter {
  std::string name;
  size_t bytes;
  size_t offset;
};

struct Kernel {
  std::string name, target;
  std::vector<Parameter> parameters;
  size_t parameter_bytes = 0, shared_bytes = 0, local_bytes = 0;
  int max_threads = 0;                            // 0: not given
  int registers = 0;                              // rows
  int predicates = 3;                             // kNever, kAlways and kCarry
  std::vector<uint64_t> constants;                // rows of 32 equal words
  std::vector<std::pair<Special, int>> specials;  // and their rows
  std::vector<Instruction> code;                  // ends with an exit
  std::vector<uint64_t> executed;                 // times, by instruction
  LaunchCounts counts{};
};

}  // namespace torchrec_dyn::ptx
