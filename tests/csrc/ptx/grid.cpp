#include "grid.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "memory_access.h"
#include "range_check.h"

namespace torchrec_dyn::ptx {
namespace {

// What nobody has written: a kernel that reads it computes nonsense, the same each time.
constexpr int kRegisterFill = 0xCD, kSharedFill = 0xA5, kLocalFill = 0xB7;
constexpr size_t kAlignment = 256;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Memory that launches use one after the other: pages that were touched once need not be made again.
class Kept {
 public:
  uint8_t* at_least(size_t bytes) {
    if (bytes > bytes_) {
      auto* memory = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, aligned(bytes)));
      if (memory == nullptr) throw std::bad_alloc();
      std::free(memory_);
      memory_ = memory;
      bytes_ = aligned(bytes);
    }
    return memory_;
  }

 private:
  uint8_t* memory_ = nullptr;
  size_t bytes_ = 0;
};

// Never destroyed: coverage and reports at the end of the process may come after all destructors.
constinit Kept* kept_registers = nullptr;
constinit Kept* kept_private = nullptr;

uint8_t* kept(Kept*& memory, size_t bytes) {
  if (memory == nullptr) memory = new Kept;
  return memory->at_least(bytes);
}

struct Sizes {
  size_t registers, predicates;  // of a warp
  size_t warps, shared, local;   // of a block; all local memory of a warp
  size_t registers_of_block() const { return warps * (registers + predicates); }
  size_t private_of_block() const { return shared + warps * local; }
};

Sizes sizes_of(const GridState& state) {
  const Kernel& kernel = *state.kernel;
  // Margins after each part, and one before the first (memory_access.h).
  return {static_cast<size_t>(kernel.registers) * kLanes * sizeof(uint64_t),
          aligned(static_cast<size_t>(kernel.predicates) * sizeof(uint32_t)), (state.threads + kLanes - 1) / kLanes,
          aligned(state.shared_bytes) + kMargin, aligned(kernel.local_bytes * kLanes) + kMargin};
}

uint64_t special_number(Special special, const Block& block, uint32_t warp, uint32_t lane) {
  const Extent &grid = block.grid->grid, &size = block.grid->block;
  const uint32_t thread = warp * kLanes + lane;
  const uint64_t below = (uint64_t{1} << lane) - 1, own = uint64_t{1} << lane;
  switch (special) {
    case Special::kThreadX:
      return thread % size.x;
    case Special::kThreadY:
      return thread / size.x % size.y;
    case Special::kThreadZ:
      return thread / size.x / size.y;
    case Special::kBlockSizeX:
      return size.x;
    case Special::kBlockSizeY:
      return size.y;
    case Special::kBlockSizeZ:
      return size.z;
    case Special::kBlockX:
      return block.number % grid.x;
    case Special::kBlockY:
      return block.number / grid.x % grid.y;
    case Special::kBlockZ:
      return block.number / grid.x / grid.y;
    case Special::kGridSizeX:
      return grid.x;
    case Special::kGridSizeY:
      return grid.y;
    case Special::kGridSizeZ:
      return grid.z;
    case Special::kLane:
      return lane;
    case Special::kWarp:
      return warp;
    case Special::kWarps:
      return block.warps.size();
    case Special::kMaskEqual:
      return own;
    case Special::kMaskLess:
      return below;
    case Special::kMaskLessEqual:
      return below | own;
    case Special::kMaskGreater:
      return kAllLanes & ~(below | own);
    case Special::kMaskGreaterEqual:
      return kAllLanes & ~below;
  }
  return 0;
}

struct Range {
  uintptr_t begin, end;
};

// A stack without a limit has all addresses up to the next memory; others may be mapped there later.
constexpr size_t kMostStack = 64 << 20;

// Of the calling thread. Asked once a thread: for the main thread, it reads a file of the system.
Range stack_of_thread() {
  thread_local Range range = [] {
    pthread_attr_t attributes;
    void* begin = nullptr;
    size_t bytes = 0;
    if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
      pthread_attr_getstack(&attributes, &begin, &bytes);
      pthread_attr_destroy(&attributes);
    }
    const uintptr_t end = reinterpret_cast<uintptr_t>(begin) + bytes;
    return Range{end - std::min(bytes, kMostStack), end};
  }();
  return range;
}

bool asks_for_races() {
  const char* text = std::getenv("TORCHREC_DYN_PTX_RACES");
  return text != nullptr && std::strcmp(text, "1") == 0;
}

}  // namespace

Grid::Grid(Kernel& kernel, const Launch& launch, uint32_t most_resident)
    : races_(nullptr, [](Races*) {}), parameters_(kernel.parameter_bytes / sizeof(uint64_t) + 4) {
  if (asks_for_races() && looks_for_races(kernel)) races_ = new_races();
  state_.kernel = &kernel;
  state_.grid = launch.grid;
  state_.block = launch.block;
  state_.threads = launch.block.x * launch.block.y * launch.block.z;
  state_.shared_bytes = launch.shared_bytes == 0 ? kernel.shared_bytes
                                                 : (kernel.shared_bytes + kAddedSharedAlignment - 1) /
                                                           kAddedSharedAlignment * kAddedSharedAlignment +
                                                       launch.shared_bytes;
  const Range stack = stack_of_thread();
  state_.stack_begin = stack.begin, state_.stack_end = stack.end;
  state_.races = races_.get();
  state_.is_checked_further = races_ != nullptr || has_range_check();

  const auto unaligned = reinterpret_cast<uintptr_t>(parameters_.data());
  state_.parameters = reinterpret_cast<uint8_t*>((unaligned + 15) / 16 * 16);
  for (size_t i = 0; i < kernel.parameters.size(); ++i)
    std::memcpy(state_.parameters + kernel.parameters[i].offset, launch.arguments[i], kernel.parameters[i].bytes);

  slots_.resize(std::min<uint64_t>(most_resident, blocks()));
  const Sizes sizes = sizes_of(state_);
  uint8_t* memory = kept(kept_private, kMargin + slots_.size() * sizes.private_of_block());
  state_.private_begin = reinterpret_cast<uintptr_t>(memory);
  state_.private_end = state_.private_begin + kMargin + slots_.size() * sizes.private_of_block();
  kept(kept_registers, slots_.size() * sizes.registers_of_block());
  for (size_t slot = slots_.size(); slot-- > 0;) {
    lay_out(slots_[slot], slot);
    free_.push_back(&slots_[slot]);
  }
}

Grid::~Grid() = default;

void Grid::lay_out(Block& block, size_t slot) {
  const Sizes sizes = sizes_of(state_);
  block.grid = &state_;
  block.shared = kept(kept_private, 0) + kMargin + slot * sizes.private_of_block();
  block.warps.resize(sizes.warps);
  uint8_t* registers = kept(kept_registers, 0) + slot * sizes.registers_of_block();
  uint8_t* local = block.shared + sizes.shared;
  for (Warp& warp : block.warps) {
    warp.block = &block;
    warp.registers = reinterpret_cast<uint64_t*>(registers);
    warp.predicates = reinterpret_cast<uint32_t*>(registers + sizes.registers);
    warp.local = local;
    warp.times = nullptr;
    if (races_ != nullptr) warp.times = times_.emplace_back(std::make_unique<LaneTimes[]>(kLanes)).get();
    registers += sizes.registers + sizes.predicates;
    local += sizes.local;
  }
}

void Grid::start_block(uint64_t number) {
  Block& block = *free_.back();
  free_.pop_back();
  resident_.push_back(&block);
  block.number = number;
  block.barriers = 0;
  const Kernel& kernel = *state_.kernel;
  std::memset(block.shared, kSharedFill, state_.shared_bytes);
  for (uint32_t i = 0; i < block.warps.size(); ++i) {
    Warp& warp = block.warps[i];
    const uint32_t threads = std::min<uint32_t>(kLanes, state_.threads - i * kLanes);
    warp.number = i;
    warp.alive = threads == kLanes ? kAllLanes : (1u << threads) - 1;
    warp.waiting = warp.at_barrier = 0;
    warp.is_descending = false;
    std::fill(warp.place, warp.place + kLanes, 0);
    std::memset(warp.registers, kRegisterFill, static_cast<size_t>(kernel.registers) * kLanes * sizeof(uint64_t));
    std::memset(warp.predicates, kRegisterFill, static_cast<size_t>(kernel.predicates) * sizeof(uint32_t));
    std::memset(warp.local, kLocalFill, kernel.local_bytes * kLanes);
    warp.predicates[kNever] = 0;
    warp.predicates[kAlways] = kAllLanes;
    for (const auto& [special, row] : kernel.specials)
      for (uint32_t lane = 0; lane < kLanes; ++lane)
        warp.registers[static_cast<size_t>(row) * kLanes + lane] = special_number(special, block, i, lane);
    if (warp.times != nullptr) begin_times(warp);
  }
}

void Grid::end_block(size_t place) {
  free_.push_back(resident_[place]);
  resident_.erase(resident_.begin() + static_cast<ptrdiff_t>(place));
}

}  // namespace torchrec_dyn::ptx
