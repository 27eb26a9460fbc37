// PTX ISA, "Parallel Synchronization and Communication Instructions: shfl.sync, vote.sync, match.sync, redux.sync,
// activemask". A handler gets the lanes of one member mask, all of them at the same instruction.
#include <algorithm>

#include "opcode.h"
#include "warp.h"

namespace torchrec_dyn::ptx {
namespace {

struct Source {
  int lane;
  bool is_in_range;
};

// The formulas of shfl.sync. c: bits 0-4 clamp the source lane, bits 8-12 split the warp into segments.
Source shuffle_source(Shuffle shuffle, int lane, uint32_t b, uint32_t c) {
  const int distance = static_cast<int>(b & 31), clamp = static_cast<int>(c & 31);
  const int segment = static_cast<int>(c >> 8 & 31);
  const int least = lane & segment, bound = least | (clamp & ~segment);
  switch (shuffle) {
    case Shuffle::kUp:
      return {lane - distance, lane - distance >= bound};
    case Shuffle::kDown:
      return {lane + distance, lane + distance <= bound};
    case Shuffle::kButterfly:
      return {lane ^ distance, (lane ^ distance) <= bound};
    default:
      return {least | (distance & ~segment), (least | (distance & ~segment)) <= bound};
  }
}

void shuffle(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t *a = read(warp, instruction.source[0]), *b = read(warp, instruction.source[1]);
  const uint64_t* c = read(warp, instruction.source[2]);
  uint64_t taken[kLanes];  // before the destination is written: it may be the source
  uint32_t in_range = 0;
  for_lanes(lanes, [&](int lane) {
    Source source =
        shuffle_source(instruction.shuffle, lane, static_cast<uint32_t>(b[lane]), static_cast<uint32_t>(c[lane]));
    in_range |= static_cast<uint32_t>(source.is_in_range) << lane;
    if (!source.is_in_range) source.lane = lane;
    if (!has_lane(lanes, source.lane))
      fail(715, warp, instruction, lane,
           "expected a source lane of the member mask " + hexadecimal(lanes) + ", got lane " +
               std::to_string(source.lane) + ", which does not take part");
    taken[lane] = static_cast<uint32_t>(a[source.lane]);
  });
  uint64_t* out = written(warp, instruction.destination[0]);
  for_lanes(lanes, [&](int lane) { out[lane] = taken[lane]; });
  if (instruction.result[0].exists()) write(warp, instruction.result[0], lanes, in_range);
}

void vote(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint32_t ballot = read(warp, instruction.condition[0]) & lanes;
  if (instruction.vote == Vote::kBallot) {
    uint64_t* out = written(warp, instruction.destination[0]);
    for_lanes(lanes, [=](int lane) { out[lane] = ballot; });
    return;
  }
  const bool any = ballot != 0, all = ballot == lanes;
  const bool result = instruction.vote == Vote::kAny ? any : instruction.vote == Vote::kAll ? all : all || !any;
  write(warp, instruction.result[0], lanes, result ? kAllLanes : 0);
}

// The lanes whose values are equal to that of each lane.
template <typename T>
void match_any(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t* a = read(warp, instruction.source[0]);
  uint64_t equal[kLanes] = {};
  for_lanes(lanes, [&](int lane) {
    for_lanes(lanes, [&](int other) { equal[lane] |= uint64_t{as<T>(a[lane]) == as<T>(a[other])} << other; });
  });
  uint64_t* out = written(warp, instruction.destination[0]);
  for_lanes(lanes, [&](int lane) { out[lane] = equal[lane]; });
}

// The mask if all values are equal, else 0.
template <typename T>
void match_all(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t* a = read(warp, instruction.source[0]);
  const T first = as<T>(a[first_lane(lanes)]);
  bool is_equal = true;
  for_lanes(lanes, [&](int lane) { is_equal &= as<T>(a[lane]) == first; });
  uint64_t* out = written(warp, instruction.destination[0]);
  for_lanes(lanes, [&](int lane) { out[lane] = is_equal ? lanes : 0; });
  if (instruction.result[0].exists()) write(warp, instruction.result[0], lanes, is_equal ? kAllLanes : 0);
}

uint32_t reduced(const Instruction& instruction, uint32_t a, uint32_t b) {
  const auto signed_a = static_cast<int32_t>(a), signed_b = static_cast<int32_t>(b);
  switch (instruction.reduction) {
    case Reduction::kAdd:
      return a + b;
    case Reduction::kMin:
      return instruction.is_signed ? static_cast<uint32_t>(std::min(signed_a, signed_b)) : std::min(a, b);
    case Reduction::kMax:
      return instruction.is_signed ? static_cast<uint32_t>(std::max(signed_a, signed_b)) : std::max(a, b);
    case Reduction::kAnd:
      return a & b;
    case Reduction::kOr:
      return a | b;
    default:
      return a ^ b;
  }
}

void redux(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t* a = read(warp, instruction.source[0]);
  auto total = static_cast<uint32_t>(a[first_lane(lanes)]);
  for_lanes(lanes & (lanes - 1),
            [&](int lane) { total = reduced(instruction, total, static_cast<uint32_t>(a[lane])); });
  uint64_t* out = written(warp, instruction.destination[0]);
  for_lanes(lanes, [=](int lane) { out[lane] = total; });
}

void active_mask(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  uint64_t* out = written(warp, instruction.destination[0]);
  for_lanes(lanes, [=](int lane) { out[lane] = lanes; });
}

void trap(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  fail(719, warp, instruction, first_lane(lanes), "expected that no lane comes here, got a trap");
}

}  // namespace

Handler shuffle_handler() { return shuffle; }
Handler vote_handler() { return vote; }

Handler match_handler(Type type, bool is_all) {
  if (type == Type::kB32) return is_all ? match_all<uint32_t> : match_any<uint32_t>;
  if (type == Type::kB64) return is_all ? match_all<uint64_t> : match_any<uint64_t>;
  return nullptr;
}

Handler redux_handler() { return redux; }
Handler active_mask_handler() { return active_mask; }
Handler trap_handler() { return trap; }

}  // namespace torchrec_dyn::ptx
