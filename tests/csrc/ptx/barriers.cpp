// PTX ISA, "Parallel Synchronization and Communication Instructions: bar, barrier", for barriers of all threads of a
// block that have not ended; and threads that wait for ever.
#include "races.h"
#include "schedule.h"

namespace torchrec_dyn::ptx {
namespace {

// An instruction where lanes wait, and the lanes.
template <typename Body>
void for_waiting_places(const Warp& warp, uint32_t lanes, const Body& body) {
  while (lanes != 0) {
    const uint32_t place = warp.place[first_lane(lanes)];
    uint32_t together = 0;
    for_lanes(lanes, [&](int lane) { together |= static_cast<uint32_t>(warp.place[lane] == place) << lane; });
    body(warp.block->grid->kernel->code[place], together);
    lanes &= ~together;
  }
}

// All threads must mean one barrier, and all of them.
void check_barrier(const Block& block, const Warp& warp, const Instruction& instruction, uint32_t lanes,
                   const Instruction& first, uint64_t first_number) {
  const uint64_t* numbers = read(warp, instruction.source[0]);
  const uint32_t threads = block.grid->threads, whole_warps = (threads + kLanes - 1) / kLanes * kLanes;
  for_lanes(lanes, [&](int lane) {
    const auto number = static_cast<uint32_t>(numbers[lane]);
    if (number != first_number || instruction.reduction != first.reduction)
      fail(702, warp, instruction, lane,
           "expected all threads of the block at barrier " + std::to_string(first_number) + " (PTX line " +
               std::to_string(first.line) + "), got one at barrier " + std::to_string(number));
    if (instruction.sources < 2) return;
    const auto expected = static_cast<uint32_t>(read(warp, instruction.source[1])[lane]);
    if (expected != threads && expected != whole_warps)
      fail(98, warp, instruction, lane,
           "expected a barrier of all " + std::to_string(threads) + " threads of the block, got one of " +
               std::to_string(expected) + ". The emulator does not support others");
  });
}

struct Counted {
  uint32_t threads = 0, yes = 0;
};

void check_aligned(const Warp& warp) {
  const Instruction* first = nullptr;
  for_waiting_places(warp, warp.at_barrier, [&](const Instruction& instruction, uint32_t lanes) {
    if (first != nullptr && (first->is_aligned || instruction.is_aligned))
      fail(715, warp, instruction, first_lane(lanes),
           "expected all lanes of the warp at one bar.sync, got others at PTX line " + std::to_string(first->line));
    first = &instruction;
  });
}

Counted count_votes(const Block& block) {
  Counted counted;
  const Instruction* first = nullptr;
  uint64_t first_number = 0;
  for (const Warp& warp : block.warps) {
    check_aligned(warp);
    for_waiting_places(warp, warp.at_barrier, [&](const Instruction& instruction, uint32_t lanes) {
      if (first == nullptr) {
        first = &instruction;
        first_number = static_cast<uint32_t>(read(warp, instruction.source[0])[first_lane(lanes)]);
      }
      check_barrier(block, warp, instruction, lanes, *first, first_number);
      counted.threads += static_cast<uint32_t>(std::popcount(lanes));
      if (instruction.reduction != Reduction::kNone)
        counted.yes += static_cast<uint32_t>(std::popcount(read(warp, instruction.condition[0]) & lanes));
    });
  }
  return counted;
}

void write_result(Warp& warp, const Instruction& instruction, uint32_t lanes, Counted counted) {
  if (instruction.reduction == Reduction::kCount) {
    uint64_t* out = written(warp, instruction.destination[0]);
    for_lanes(lanes, [=](int lane) { out[lane] = counted.yes; });
  } else if (instruction.reduction != Reduction::kNone) {
    const bool is_and = instruction.reduction == Reduction::kAnd;
    const bool result = is_and ? counted.yes == counted.threads : counted.yes != 0;
    write(warp, instruction.result[0], lanes, result ? kAllLanes : 0);
  }
}

}  // namespace

bool pass_barrier(Block& block) {
  uint32_t waiting = 0;
  for (const Warp& warp : block.warps) {
    if (warp.alive != warp.at_barrier) return false;
    waiting |= warp.at_barrier;
  }
  if (waiting == 0) return false;
  const Counted counted = count_votes(block);
  Kernel& kernel = *block.grid->kernel;
  for (Warp& warp : block.warps) {
    for_waiting_places(warp, warp.at_barrier, [&](const Instruction& instruction, uint32_t lanes) {
      ++kernel.executed[static_cast<size_t>(&instruction - kernel.code.data())];
      write_result(warp, instruction, lanes, counted);
    });
    for_lanes(warp.at_barrier, [&warp](int lane) { ++warp.place[lane]; });
    warp.at_barrier = 0;
  }
  note_barrier(block);
  return true;
}

void fail_deadlock(const Block& block) {
  std::string others;
  const Warp* first_warp = nullptr;
  const Instruction* first = nullptr;
  int lane = 0;
  for (const Warp& warp : block.warps) {
    for_waiting_places(warp, warp.waiting | warp.at_barrier, [&](const Instruction& instruction, uint32_t lanes) {
      if (first == nullptr) first_warp = &warp, first = &instruction, lane = first_lane(lanes);
      others += "\n  warp " + std::to_string(warp.number) + ", lanes " + hexadecimal(lanes) + ", PTX line " +
                std::to_string(instruction.line) + " (" + instruction.text + ")";
      if (instruction.control == Control::kWarpSync)
        others += ", member mask " + hexadecimal(warp.member_mask[first_lane(lanes)]);
    });
  }
  fail(702, *first_warp, *first, lane, "expected that lanes that wait are joined by others, got a deadlock:" + others);
}

}  // namespace torchrec_dyn::ptx
