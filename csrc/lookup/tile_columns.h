// The columns of a row on the lanes of a tile (simt_tiles.h): a lane has units of four neighbouring columns, which it
// reads and writes as one piece of memory. The sum of squares has the bits of mean_square (row_update.h).
#pragma once

#include <cstdint>

#include "simt_tiles.h"
#include "storage/row_units.h"

namespace torchrec_dyn {

// A tile has kColumns columns in registers: unit u of lane l begins at column 4 (l + u kLanes) of them.
// kIsWhole: all rows, states and gradients have a multiple of four columns and begin at a multiple of the size of a
// unit; else a lane reads its columns one by one.
// kHasSlices: a row may have more columns than kColumns.
template <int kLanesATile, int kUnitsALane, bool kIsWholeRow, bool kHasSlicesOfRows>
struct TileShape {
  static constexpr int kLanes = kLanesATile;
  static constexpr int kUnits = kUnitsALane;
  static constexpr bool kIsWhole = kIsWholeRow;
  static constexpr bool kHasSlices = kHasSlicesOfRows;
  static constexpr int kLaneColumns = kUnits * kUnitColumns;
  static constexpr uint32_t kColumns = kLanes * kLaneColumns;
};

// By the columns of the widest row: at most 16, 32, 64, 128, 256, any number; any rows.
using Tile16 = TileShape<4, 1, true, false>;
using Tile32 = TileShape<4, 2, true, false>;
using Tile64 = TileShape<8, 2, true, false>;
using Tile128 = TileShape<16, 2, true, false>;
using Tile256 = TileShape<16, 4, true, false>;
using WideTile = TileShape<16, 2, true, true>;
using AnyTile = TileShape<16, 1, false, true>;

template <typename Shape>
struct LaneColumns {
  float numbers[Shape::kLaneColumns];
};
template <typename Shape>
using TileColumns = simt::PerLane<LaneColumns<Shape>, Shape::kLanes>;

// Columns of a row that a tile has at once.
template <typename Shape>
struct Slice {
  uint32_t first;
  uint32_t columns;  // of the row: below 2^31

  TORCHREC_DYN_BOTH uint32_t column(int lane, int unit) const {
    return first + static_cast<uint32_t>(kUnitColumns * (lane + unit * Shape::kLanes));
  }
  // Columns of the row from the unit on; below 1 if it has none.
  TORCHREC_DYN_BOTH int left(int lane, int unit) const {
    return static_cast<int>(columns) - static_cast<int>(column(lane, unit));
  }
};

// The numbers of a lane. Where the row has no columns they are those of its last: then no lane reads on a condition,
// and all reads of a lane are made at once.
template <typename Shape, typename T>
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void load_lane(const T* row, const Slice<Shape>& slice, int lane,
                                                     float (&to)[Shape::kLaneColumns]) {
  for (int u = 0; u < Shape::kUnits; ++u) {
    const uint32_t column = slice.column(lane, u);
    float unit[kUnitColumns];
    if constexpr (Shape::kIsWhole) {
      load_columns(row + lesser_of(column, slice.columns - kUnitColumns), true, unit);
    } else {
      for (uint32_t c = 0; c < kUnitColumns; ++c) unit[c] = to_float(row[lesser_of(column + c, slice.columns - 1)]);
    }
    for (int c = 0; c < kUnitColumns; ++c) to[u * kUnitColumns + c] = unit[c];
  }
}

// Writes the columns that the row has.
template <typename Shape, typename T>
TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void store_lane(const T (&from)[Shape::kLaneColumns], const Slice<Shape>& slice,
                                                      int lane, T* row) {
  for (int u = 0; u < Shape::kUnits; ++u) {
    const T* const unit = from + u * kUnitColumns;
    T* const to = row + slice.column(lane, u);
    if constexpr (Shape::kIsWhole) {
      if (slice.left(lane, u) > 0) store_unit_of(unit, to);
    } else {
      for (int c = 0; c < kUnitColumns; ++c)
        if (c < slice.left(lane, u)) to[c] = unit[c];
    }
  }
}

// The sum of the squares of a row, with the bits of mean_square: sum p of sixteen is that of the columns p, p + 16, ...
// in this order. The lanes whose units have the same columns modulo 16 (every fourth lane) share out their four sums.
template <typename Shape>
class SumOfSquares {
  static constexpr int kLanes = Shape::kLanes;
  static constexpr int kSharers = kLanes / 4;
  static constexpr int kHeld = kUnitColumns / kSharers;  // sums of a lane
  static_assert(torchrec_dyn::kLanes == 16);

  struct Unit {
    float numbers[kUnitColumns];
  };
  using Units = simt::PerLane<Unit, kLanes>;

 public:
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE SumOfSquares() {
    simt::each_lane<kLanes>([&](int lane) {
      for (int h = 0; h < kHeld; ++h) sums_[h][lane] = 0.0f;
    });
  }

  // Adds the columns of a slice; slices come in order. Columns that the row has not count as 0: they change no bit.
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE void add(const TileColumns<Shape>& columns, const Slice<Shape>& slice) {
    for (int u = 0; u < Shape::kUnits; ++u) {
      Units squares;
      simt::each_lane<kLanes>([&](int lane) {
        for (int c = 0; c < kUnitColumns; ++c) {
          const float value = columns[lane].numbers[u * kUnitColumns + c];
          squares[lane].numbers[c] = (Shape::kIsWhole ? 0 : c) < slice.left(lane, u) ? value * value : 0.0f;
        }
      });
      if constexpr (kSharers > 1) {
        trade(squares, kLanes / 2, 0, 2);
        trade(squares, kLanes / 2, 1, 3);
      }
      if constexpr (kSharers > 2) {
        trade(squares, kLanes / 4, 0, 1);
        trade(squares, kLanes / 4, 2, 3);
      }
      simt::each_lane<kLanes>([&](int lane) {
        for (int c = 0; c < kUnitColumns; ++c) sums_[c % kHeld][lane] += squares[lane].numbers[c];
      });
    }
  }

  // The tree of sum_of_lanes (simd.h).
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE float total() {
    for (int h = 0; h < kHeld; ++h) {
      add_partners(sums_[h], 2);
      add_partners(sums_[h], 1);
    }
    for (int half = 2; half >= 1; half /= 2)
      for (int h = 0; h < (half < kHeld ? half : kHeld); ++h) {
        if (half < kHeld)
          simt::each_lane<kLanes>([&](int lane) { sums_[h][lane] += sums_[h + half][lane]; });
        else
          add_partners(sums_[h], kUnitColumns * half / kHeld);
      }
    return simt::same_of_lanes(sums_[0]);
  }

 private:
  // Of two partners, whose numbers differ in this bit, the lower gets number `a` of both and the upper number `b`: then
  // `a` is the lower partner's, and `b` the upper partner's.
  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE static void trade(Units& units, int bit, int a, int b) {
    simt::PerLane<float, kLanes> given;
    simt::each_lane<kLanes>(
        [&](int lane) { given[lane] = (lane & bit) == 0 ? units[lane].numbers[b] : units[lane].numbers[a]; });
    const simt::PerLane<float, kLanes> taken = simt::shuffle_xor(given, bit);
    simt::each_lane<kLanes>([&](int lane) {
      float (&own)[kUnitColumns] = units[lane].numbers;
      own[a] = (lane & bit) == 0 ? own[a] : taken[lane];
      own[b] = (lane & bit) == 0 ? taken[lane] : own[b];
    });
  }

  TORCHREC_DYN_BOTH TORCHREC_DYN_INLINE static void add_partners(simt::PerLane<float, kLanes>& sums, int bit) {
    const simt::PerLane<float, kLanes> others = simt::shuffle_xor(sums, bit);
    simt::each_lane<kLanes>([&](int lane) { sums[lane] += others[lane]; });
  }

  simt::PerLane<float, kLanes> sums_[kHeld];
};

}  // namespace torchrec_dyn
