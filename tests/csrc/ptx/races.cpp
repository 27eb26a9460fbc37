#include "races.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>

#include "opcode.h"

namespace torchrec_dyn::ptx {

struct Learned {
  std::map<std::pair<uint64_t, uint32_t>, uint32_t> times;  // by block and thread
  std::map<uint64_t, uint32_t> barriers;                    // by block: accesses before this barrier
};

namespace {

constexpr uint32_t kNobody = 0xFFFFFFFFu;

// One access of a thread.
struct Moment {
  uint64_t block = 0;
  uint32_t thread = kNobody;  // in its block
  uint32_t time = 0, barriers = 0;
  uint32_t instruction = 0;
  bool is_strong = false;
  bool exists() const { return thread != kNobody; }
};

// The accesses of one byte: the last write, the last read, and a read that was not ordered before it.
struct Byte {
  uint64_t owner = 0;
  Moment write, reads[2];
};

constexpr size_t kChunk = 64;
struct Chunk {
  Byte bytes[kChunk];
};

uint32_t thread_of(const Warp& warp, int lane) { return warp.number * kLanes + static_cast<uint32_t>(lane); }

LearnedPointer joined(const LearnedPointer& a, const LearnedPointer& b) {
  if (a == b || b == nullptr) return a;
  if (a == nullptr) return b;
  auto both = std::make_shared<Learned>(*a);
  for (const auto& [thread, time] : b->times) both->times[thread] = std::max(both->times[thread], time);
  for (const auto& [block, age] : b->barriers) both->barriers[block] = std::max(both->barriers[block], age);
  return both;
}

// All that a lane knows now, itself included.
LearnedPointer knowledge(const Warp& warp, int lane) {
  const LaneTimes& times = warp.times[lane];
  auto all = times.learned == nullptr ? std::make_shared<Learned>() : std::make_shared<Learned>(*times.learned);
  for (int other = 0; other < kLanes; ++other) {
    uint32_t& time = all->times[{warp.block->number, thread_of(warp, other)}];
    time = std::max(time, times.known[other]);
  }
  all->barriers[warp.block->number] = warp.block->barriers;
  return all;
}

bool is_ordered(const Moment& before, const Warp& warp, int lane) {
  const Block& block = *warp.block;
  const LaneTimes& times = warp.times[lane];
  if (before.block == block.number) {
    if (before.thread == thread_of(warp, lane) || before.barriers < block.barriers) return true;
    if (before.thread / kLanes == warp.number && before.time <= times.known[before.thread % kLanes]) return true;
  }
  if (times.learned == nullptr) return false;
  const auto age = times.learned->barriers.find(before.block);
  if (age != times.learned->barriers.end() && before.barriers < age->second) return true;
  const auto time = times.learned->times.find({before.block, before.thread});
  return time != times.learned->times.end() && before.time <= time->second;
}

bool releases(Order order) { return order == Order::kRelease || order == Order::kAcquireRelease; }
bool acquires(Order order) { return order == Order::kAcquire || order == Order::kAcquireRelease; }

// Of a launch: reports of the same two instructions are left out for the whole process.
bool is_new(const Kernel& kernel, uint32_t before, uint32_t now) {
  static auto& seen = *new std::set<std::tuple<std::string, uint32_t, uint32_t>>;  // launches hold a lock
  return seen.emplace(kernel.name, std::min(before, now), std::max(before, now)).second;
}

}  // namespace

struct Races {
  std::unordered_map<uintptr_t, std::unique_ptr<Chunk>> chunks;
  std::unordered_map<uintptr_t, Released> released;  // by the address of a word that was written strongly

  Byte& byte_at(const Warp& warp, uintptr_t address) {
    std::unique_ptr<Chunk>& chunk = chunks[address / kChunk];
    if (chunk == nullptr) chunk = std::make_unique<Chunk>();
    Byte& byte = chunk->bytes[address % kChunk];
    // Shared memory of a block that has ended is given to another.
    const GridState& grid = *warp.block->grid;
    const bool is_private = address - grid.private_begin < grid.private_end - grid.private_begin;
    const uint64_t owner = is_private ? warp.block->number + 1 : 0;
    if (byte.owner != owner) byte = Byte{.owner = owner, .write = {}, .reads = {}};
    return byte;
  }
};

namespace {

void report_race(const Warp& warp, const Instruction& instruction, int lane, uintptr_t address, const Moment& before,
                 const char* kinds) {
  const Kernel& kernel = *warp.block->grid->kernel;
  const Instruction& other = kernel.code[before.instruction];
  const auto now = static_cast<uint32_t>(&instruction - kernel.code.data());
  if (!is_new(kernel, before.instruction, now)) return;
  report(place_of(warp, instruction, lane) + ": expected accesses that something orders, got a race at " +
         hexadecimal(address) + ", " + kinds + " of block " + std::to_string(before.block) + ", warp " +
         std::to_string(before.thread / kLanes) + ", lane " + std::to_string(before.thread % kLanes) + ", PTX line " +
         std::to_string(other.line) + " (" + other.text + ")");
}

// Returns true if a race was found.
bool compare(const Warp& warp, const Instruction& instruction, int lane, uintptr_t address, const Moment& before,
             const char* kinds) {
  if (!before.exists() || (before.is_strong && instruction.order != Order::kWeak) || is_ordered(before, warp, lane))
    return false;
  report_race(warp, instruction, lane, address, before, kinds);
  return true;
}

void note_byte(Byte& byte, const Warp& warp, const Instruction& instruction, int lane, uintptr_t address, bool reads,
               bool writes) {
  const Moment now{warp.block->number,
                   thread_of(warp, lane),
                   warp.times[lane].known[lane],
                   warp.block->barriers,
                   static_cast<uint32_t>(&instruction - warp.block->grid->kernel->code.data()),
                   instruction.order != Order::kWeak};
  bool found =
      compare(warp, instruction, lane, address, byte.write, writes ? "write after a write" : "read after a write");
  for (const Moment& read : byte.reads)
    found = found || (writes && compare(warp, instruction, lane, address, read, "write after a read"));
  if (writes) byte.write = now;
  if (reads) {
    if (byte.reads[0].exists() && !is_ordered(byte.reads[0], warp, lane)) byte.reads[1] = byte.reads[0];
    byte.reads[0] = now;
  }
}

void learn(LaneTimes& times, const Released& released, uint64_t block) {
  if (released.is_for_block && released.block != block) return;
  times.learned = joined(times.learned, released.learned);
}

Released join_released(const Released& a, const Released& b) {
  if (a.learned == nullptr) return b;
  if (b.learned == nullptr) return a;
  // Two scopes: the narrower one's block is the least that is right.
  return {joined(a.learned, b.learned), a.is_for_block || b.is_for_block, a.is_for_block ? a.block : b.block};
}

Released release(const Warp& warp, int lane, bool is_for_block) {
  Released released{knowledge(warp, lane), is_for_block, warp.block->number};
  ++warp.times[lane].known[lane];  // what the lane does from now on is not part of it
  return released;
}

void note_strong(Races& races, const Warp& warp, const Instruction& instruction, int lane, uintptr_t address,
                 bool reads, bool writes) {
  LaneTimes& times = warp.times[lane];
  const auto found = races.released.find(address);
  if (reads && found != races.released.end()) {
    times.pending = join_released(times.pending, found->second);
    if (acquires(instruction.order)) learn(times, found->second, warp.block->number);
  }
  if (!writes) return;
  Released mine = releases(instruction.order) ? release(warp, lane, instruction.is_for_block) : times.fenced;
  // An atomic access continues the release that it read.
  if (reads && found != races.released.end()) mine = join_released(mine, found->second);
  if (mine.learned != nullptr)
    races.released[address] = mine;
  else if (found != races.released.end())
    races.released.erase(found);
}

void synchronize_warp(Warp& warp, const Instruction&, uint32_t lanes) {
  if (warp.times == nullptr) return;
  uint32_t latest[kLanes] = {};
  LearnedPointer learned;
  for_lanes(lanes, [&](int lane) {
    for (int other = 0; other < kLanes; ++other) latest[other] = std::max(latest[other], warp.times[lane].known[other]);
    learned = joined(learned, warp.times[lane].learned);
  });
  for_lanes(lanes, [&](int lane) {
    std::copy(latest, latest + kLanes, warp.times[lane].known);
    ++warp.times[lane].known[lane];
    warp.times[lane].learned = learned;
  });
}

void fence(Warp& warp, const Instruction& instruction, uint32_t lanes) {
  if (warp.times == nullptr) return;
  for_lanes(lanes, [&](int lane) {
    LaneTimes& times = warp.times[lane];
    learn(times, times.pending, warp.block->number);
    times.pending = {};
    times.fenced = release(warp, lane, instruction.is_for_block);
  });
}

}  // namespace

std::unique_ptr<Races, void (*)(Races*)> new_races() {
  return {new Races, [](Races* races) { delete races; }};
}

bool looks_for_races(const Kernel& kernel) { return !kernel.name.starts_with("_ZN3cub"); }

void begin_times(Warp& warp) {
  for (int lane = 0; lane < kLanes; ++lane) {
    warp.times[lane] = {};
    warp.times[lane].known[lane] = 1;
  }
}

void note_access(const Warp& warp, const Instruction& instruction, int lane, uintptr_t address, size_t bytes,
                 bool is_write) {
  Races& races = *warp.block->grid->races;
  const bool reads = !is_write || instruction.is_atomic;
  for (size_t i = 0; i < bytes; ++i)
    note_byte(races.byte_at(warp, address + i), warp, instruction, lane, address + i, reads, is_write);
  if (instruction.order != Order::kWeak) note_strong(races, warp, instruction, lane, address, reads, is_write);
}

// Whatever one thread of the block learned, all know now.
void note_barrier(Block& block) {
  ++block.barriers;
  if (block.grid->races == nullptr) return;
  LearnedPointer learned;
  for (const Warp& warp : block.warps)
    for (int lane = 0; lane < kLanes; ++lane) learned = joined(learned, warp.times[lane].learned);
  if (learned == nullptr) return;
  for (const Warp& warp : block.warps)
    for (int lane = 0; lane < kLanes; ++lane) warp.times[lane].learned = learned;
}

Handler fence_handler() { return fence; }
Handler warp_barrier_handler() { return synchronize_warp; }

}  // namespace torchrec_dyn::ptx
