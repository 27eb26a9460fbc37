// One turn of a warp: control flow, and lanes that wait for each other (PTX ISA, "Independent Thread Scheduling",
// "Control Flow Instructions", and the member masks of the .sync instructions).
#include "schedule.h"

namespace torchrec_dyn::ptx {
namespace {

// Few enough that a warp that waits for another block in a loop does not wait long.
constexpr uint32_t kConvergedSteps = 2000, kRandomSteps = 64;

void park(Warp& warp, uint32_t lanes, uint32_t place) {
  for_lanes(lanes, [&warp, place](int lane) { warp.place[lane] = place; });
}

uint32_t lanes_at(const Warp& warp, uint32_t lanes, uint32_t place) {
  uint32_t found = 0;
  for_lanes(lanes, [&](int lane) { found |= static_cast<uint32_t>(warp.place[lane] == place) << lane; });
  return found;
}

uint32_t chosen_place(const Warp& warp, uint32_t ready, Turns& turns) {
  if (turns.schedule == Schedule::kConverged) {
    uint32_t lowest = ~0u;
    for_lanes(ready, [&](int lane) { lowest = warp.place[lane] < lowest ? warp.place[lane] : lowest; });
    return lowest;
  }
  for (uint32_t passed = turns.random.below(static_cast<uint32_t>(std::popcount(ready))); passed > 0; --passed)
    ready &= ready - 1;
  return warp.place[first_lane(ready)];
}

// Lanes of `lanes` that wait in the same way as `lane`: with the same mask, at the same instruction. bar.warp.sync may
// stand in several places.
uint32_t arrived_with(const Warp& warp, int lane) {
  const std::vector<Instruction>& code = warp.block->grid->kernel->code;
  const bool is_barrier = code[warp.place[lane]].is_warp_barrier;
  uint32_t arrived = 0;
  for_lanes(warp.waiting, [&](int other) {
    const bool is_together =
        warp.place[other] == warp.place[lane] || (is_barrier && code[warp.place[other]].is_warp_barrier);
    if (is_together && warp.member_mask[other] == warp.member_mask[lane]) arrived |= 1u << other;
  });
  return arrived;
}

// Runs the .sync of lanes that wait if all lanes of their mask are there, or have ended. Returns true if there are
// such.
bool release_some(Warp& warp) {
  for (uint32_t left = warp.waiting; left != 0;) {
    const int lane = first_lane(left);
    const uint32_t arrived = arrived_with(warp, lane);
    left &= ~arrived;
    if ((warp.member_mask[lane] & warp.alive & ~arrived) != 0) continue;
    Kernel& kernel = *warp.block->grid->kernel;
    const uint32_t place = warp.place[lane];
    ++kernel.executed[place];
    kernel.code[place].run(warp, kernel.code[place], arrived);
    for_lanes(arrived, [&warp](int each) { ++warp.place[each]; });
    warp.waiting &= ~arrived;
    return true;
  }
  return false;
}

// Notes the member masks of lanes that come to a .sync. Returns true if they are one mask.
bool note_masks(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const uint64_t* masks = read(warp, instruction.member_mask);
  const auto first = static_cast<uint32_t>(masks[first_lane(lanes)]);
  bool is_one = true;
  for_lanes(lanes, [&](int lane) {
    const auto mask = static_cast<uint32_t>(masks[lane]);
    if (!has_lane(mask, lane))
      fail(715, warp, instruction, lane,
           "expected a member mask with the lane that executes it, got " + hexadecimal(mask));
    warp.member_mask[lane] = mask;
    is_one &= mask == first;
  });
  return is_one;
}

}  // namespace

bool run_turn(Warp& warp, Turns& turns) {
  const uint32_t ready = warp.alive & ~(warp.waiting | warp.at_barrier);
  if (ready == 0) return release_some(warp);
  const bool is_converged = turns.schedule == Schedule::kConverged;
  uint32_t place = chosen_place(warp, ready, turns);
  uint32_t group = lanes_at(warp, ready, place);
  if (turns.schedule == Schedule::kSplit && turns.random.below(4) == 0)
    if (const uint32_t part = group & turns.random.next(); part != 0) group = part;
  // Lanes that are alone need not look for others where branches meet.
  const bool is_alone = group == ready && turns.schedule != Schedule::kSplit;
  warp.is_descending = !is_converged && turns.random.below(2) == 1;
  uint32_t steps = is_converged ? kConvergedSteps : 1 + turns.random.below(kRandomSteps);

  Kernel& kernel = *warp.block->grid->kernel;
  for (bool is_first = true;; is_first = false) {
    const Instruction& instruction = kernel.code[place];
    if (!is_first && (steps == 0 || (instruction.is_meeting_point && !is_alone))) {
      park(warp, group, place);
      return true;
    }
    --steps;
    if (turns.steps_left-- == 0)
      fail(702, warp, instruction, first_lane(group),
           "expected the end of the launch, got as many steps as TORCHREC_DYN_PTX_STEPS allows: an endless loop");
    const uint32_t lanes = instruction.guard.exists() ? read(warp, instruction.guard) & group : group;
    if (lanes == 0) {
      ++place;
      continue;
    }
    switch (instruction.control) {
      case Control::kPlain:
        ++kernel.executed[place];
        instruction.run(warp, instruction, lanes);
        ++place;
        break;
      case Control::kBranch:
        ++kernel.executed[place];
        if (lanes != group) {
          park(warp, lanes, instruction.target);
          park(warp, group & ~lanes, place + 1);
          return true;
        }
        place = instruction.target;
        break;
      case Control::kYield:
        ++kernel.executed[place];
        if (instruction.run != nullptr) instruction.run(warp, instruction, lanes);
        park(warp, group, place + 1);
        return true;
      case Control::kExit:
        ++kernel.executed[place];
        warp.alive &= ~lanes;
        park(warp, group & ~lanes, place + 1);
        release_some(warp);  // lanes may have waited for these
        return true;
      case Control::kBarrier:
        park(warp, lanes, place);
        park(warp, group & ~lanes, place + 1);
        warp.at_barrier |= lanes;
        return true;
      case Control::kWarpSync:
        if (note_masks(warp, instruction, lanes) && lanes == group &&
            (warp.member_mask[first_lane(lanes)] & warp.alive & ~lanes) == 0) {
          ++kernel.executed[place];
          instruction.run(warp, instruction, lanes);
          ++place;
          break;
        }
        park(warp, lanes, place);
        park(warp, group & ~lanes, place + 1);
        warp.waiting |= lanes;
        while (release_some(warp)) {
        }
        return true;
    }
  }
}

}  // namespace torchrec_dyn::ptx
