// The memory and the resident blocks of one launch.
#pragma once

#include <memory>
#include <vector>

#include "races.h"
#include "warp.h"

namespace torchrec_dyn::ptx {

// Owned by a frame that no longjmp leaves, so that whatever ends a launch, its memory is given back.
class Grid {
 public:
  Grid(Kernel& kernel, const Launch& launch, uint32_t most_resident);
  Grid(const Grid&) = delete;
  Grid& operator=(const Grid&) = delete;
  ~Grid();

  GridState& state() { return state_; }
  uint64_t blocks() const { return uint64_t{state_.grid.x} * state_.grid.y * state_.grid.z; }
  std::vector<Block*>& resident() { return resident_; }

  void start_block(uint64_t number);
  void end_block(size_t place);  // in resident()

 private:
  void lay_out(Block& block, size_t slot);

  GridState state_{};
  std::vector<Block> slots_;
  std::vector<Block*> resident_, free_;
  std::vector<std::unique_ptr<LaneTimes[]>> times_;
  std::unique_ptr<Races, void (*)(Races*)> races_;
  std::vector<uint64_t> parameters_;
};

}  // namespace torchrec_dyn::ptx
