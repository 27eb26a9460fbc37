// The kernels of cache_rows_ and row_places (simt.h): rows of a table in host memory that are in the GPU's memory, too,
// in frames (docs/dev/decisions/0051). Numbers of rows and of frames are those of one list of blocks: the blocks of the
// host first, then those of the frames, which begin at row `base` of the list.
//
//   1. FindMissing: frames of the batch's rows are used now; a row without a frame is listed once.
//   2. PlanEvictions: how many frames are needed beyond the free ones. If none is, the kernels of 3 and 4 do nothing.
//   3. CountAges, AddAges, ChooseAges: the age at which enough frames are found. CountTies, ChooseRows: of the frames
//   of
//      this age those of the lowest rows, in bins of neighbouring rows: so no two frames are ever compared.
//   4. WriteBackRows, FreeFrames: the rows of these frames go back to the host.
//   5. AssignFrames, LoadRows, FinishPlans: the missing rows get frames, as far as there are frames.
#pragma once

#include <cstdint>

#include "both_devices.h"
#include "simt.h"
#include "simt_tiles.h"
#include "storage/row_units.h"
#include "storage/table_of.h"

namespace torchrec_dyn {

// Rows of one store of a table as bytes: the weights, or an optimizer state.
struct ByteRows {
  char* const* blocks;
  int64_t shift;
  int64_t row_bytes;
  bool is_whole;  // rows are multiples of 16 bytes, at such addresses

  TORCHREC_DYN_BOTH char* row(int64_t index) const {
    return blocks[index >> shift] + (index & ((int64_t{1} << shift) - 1)) * row_bytes;
  }
};

// The words of RowCache.counts.
enum : int64_t { kFreeFrames, kUsedFrames, kLoadedRows, kWrittenRows, kCacheCounts };

// What a call decides of one cache.
struct CachePlan {
  int64_t missing;  // rows of the batch without a frame
  int64_t need;     // frames beyond the free ones
  int64_t last;     // frames of ages before it in the order of age_place go; -1: none
  int64_t ties;     // frames of this age that are needed, too
  int64_t tie;      // the last bin of them
  int64_t written;  // rows that went back
};

constexpr int64_t kTies = 2048;  // bins of rows

// Ages of frames in calls, of which those up to 127 are counted one by one, and others in 64 parts of each octave. The
// oldest are first.
constexpr int64_t kAgeBits = 6;
constexpr int64_t kAges = (int64_t{1} << kAgeBits) * (32 - kAgeBits + 1);

TORCHREC_DYN_BOTH inline int64_t age_place(uint32_t age) {
  int octave = 0;
  while (age >> octave >= (uint32_t{2} << kAgeBits)) ++octave;
  return kAges - 1 - ((int64_t{octave} << kAgeBits) + (age >> octave));
}

// Of one table: `places` [rows], the row's frame + 1, or less than 1; of each frame [frames] its row or -1, and the
// call that used it last; the free frames, of which the first counts[kFreeFrames] count. Frames from
// counts[kUsedFrames] on were never used. Numbers in the memory of the device are looked at before they are followed:
// no contents lead outside.
struct RowCache {
  int32_t* places;
  int64_t rows;
  int64_t* owners;
  int32_t* used;
  int32_t* free;
  int64_t* counts;
  int64_t frames;
  int64_t base;
  uint32_t now;
  int64_t begin;  // the table's rows in the batch are [begin, end)
  int64_t end;
  int64_t first_frame;  // of all caches, one after the other
  CachePlan* plan;
  int64_t first_store;
  int64_t stores;

  TORCHREC_DYN_BOTH bool has_row(int64_t row) const { return static_cast<uint64_t>(row) < static_cast<uint64_t>(rows); }
  TORCHREC_DYN_BOTH bool has_position(int64_t i) const { return i >= begin && i < end; }
  // The place of a row while this call looks for its frame. That of a call which ended there, as a scan found no
  // memory, is as good as 0.
  TORCHREC_DYN_BOTH int32_t claim() const { return -1 - static_cast<int32_t>(now & 0x3fffffff); }
  // The frame of a row, or less than 0.
  TORCHREC_DYN_BOTH int64_t frame_of(int64_t row) const {
    const int64_t frame = simt::load(places + row) - int64_t{1};
    return frame < frames ? frame : -1;
  }
  TORCHREC_DYN_BOTH int64_t free_frames() const { return between(counts[kFreeFrames]); }
  TORCHREC_DYN_BOTH int64_t used_frames() const { return between(counts[kUsedFrames]); }
  TORCHREC_DYN_BOTH int64_t between(int64_t count) const { return count < 0 ? 0 : lesser_of(count, frames); }
  // The place of a frame's age in the order of ChooseAges; -1 if it has no row, or is used by this call.
  TORCHREC_DYN_BOTH int64_t age_of(int64_t frame) const {
    if (frame >= used_frames() || !has_row(owners[frame])) return -1;
    const uint32_t age = now - static_cast<uint32_t>(used[frame]);
    return age == 0 ? -1 : age_place(age);
  }
  // The bin of a frame that has a row.
  TORCHREC_DYN_BOTH int64_t tie_of(int64_t frame) const {
    return static_cast<int64_t>(static_cast<uint64_t>(owners[frame]) * kTies / static_cast<uint64_t>(rows));
  }
  TORCHREC_DYN_BOTH bool is_leaving(int64_t frame) const {
    const int64_t age = plan->last < 0 ? -1 : age_of(frame);
    return age >= 0 && (age < plan->last || (age == plan->last && tie_of(frame) <= plan->tie));
  }
};

struct RowCaches {
  const RowCache* caches;
  int64_t count;

  // Of a row of the batch; another one if the row's table has no cache.
  TORCHREC_DYN_BOTH const RowCache& of_row(int64_t i) const {
    return caches[table_of(i, count, [this](int64_t c) { return caches[c].begin; })];
  }
  TORCHREC_DYN_BOTH const RowCache& of_frame(int64_t i) const {
    return caches[table_of(i, count, [this](int64_t c) { return caches[c].first_frame; })];
  }
};

struct FindMissing {
  RowCaches all;
  const int64_t* rows;
  int64_t* missing;  // of each table from its begin on

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const RowCache& cache = all.of_row(i);
    const int64_t row = rows[i];
    if (!cache.has_position(i) || !cache.has_row(row)) return;
    if (const int64_t frame = cache.frame_of(row); frame >= 0)
      return simt::store(cache.used + frame, static_cast<int32_t>(cache.now));
    const int32_t place = simt::load(cache.places + row), claim = cache.claim();
    if (place > 0 || place == claim || simt::atomic_cas(cache.places + row, place, claim) != place) return;
    missing[cache.begin + simt::atomic_add(&cache.plan->missing, 1)] = row;
  }
};

struct PlanEvictions {
  RowCaches all;

  TORCHREC_DYN_BOTH void operator()(int64_t c) const {
    const RowCache& cache = all.caches[c];
    const int64_t free = cache.free_frames() + cache.frames - cache.used_frames();
    cache.plan->need = greater_of(cache.plan->missing - free, int64_t{0});
    cache.plan->last = -1;
  }
};

// Most frames may have the same age, so they are counted in several copies.
constexpr int64_t kAgeCopies = 8;

struct CountAges {
  RowCaches all;
  int64_t* counts;  // [caches, kAgeCopies, kAges]

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const RowCache& cache = all.of_frame(i);
    if (cache.plan->need == 0) return;
    const int64_t age = cache.age_of(i - cache.first_frame), c = &cache - all.caches;
    if (age >= 0) simt::warp_aggregated_increment(counts + (c * kAgeCopies + i / 32 % kAgeCopies) * kAges + age);
  }
};

// Launched with one thread more than there are totals: the sums then end with the number of frames.
struct AddAges {
  const int64_t* counts;
  int64_t* totals;  // [caches, kAges], and one more
  int64_t caches;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    int64_t total = 0;
    for (int64_t copy = 0; copy < kAgeCopies && i < caches * kAges; ++copy)
      total += counts[(i / kAges * kAgeCopies + copy) * kAges + i % kAges];
    totals[i] = total;
  }
};

// If fewer frames may go than are needed, all of them go.
struct ChooseAges {
  RowCaches all;
  const int64_t* sums;  // of the totals

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const RowCache& cache = all.caches[i / kAges];
    const int64_t first = sums[i / kAges * kAges], need = cache.plan->need;
    const bool is_last = i % kAges == kAges - 1;
    if (sums[i] - first >= need || (need > sums[i + 1] - first && !is_last)) return;
    cache.plan->last = i % kAges;
    cache.plan->ties = need - (sums[i] - first);
  }
};

struct CountTies {
  RowCaches all;
  int64_t* counts;  // [caches, kTies], and one more

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const RowCache& cache = all.of_frame(i);
    const int64_t frame = i - cache.first_frame, c = &cache - all.caches;
    if (cache.plan->last >= 0 && cache.age_of(frame) == cache.plan->last)
      simt::warp_aggregated_increment(counts + c * kTies + cache.tie_of(frame));
  }
};

struct ChooseRows {
  RowCaches all;
  const int64_t* sums;  // of the counts

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const RowCache& cache = all.caches[i / kTies];
    const int64_t first = sums[i / kTies * kTies], ties = cache.plan->ties;
    const bool is_last = i % kTies == kTies - 1;
    if (cache.plan->last >= 0 && sums[i] - first < ties && (ties <= sums[i + 1] - first || is_last))
      cache.plan->tie = i % kTies;
  }
};

constexpr int kCopyLanes = 8;

TORCHREC_DYN_BOTH inline void copy_row(const ByteRows& rows, int64_t from, int64_t to) {
  simt::each_lane<kCopyLanes>([&](int lane) {
    const char* source = rows.row(from);
    char* target = rows.row(to);
    if (rows.is_whole) {
      for (int64_t byte = lane * kMostUnitBytes; byte < rows.row_bytes; byte += kCopyLanes * kMostUnitBytes)
        store_unit(*reinterpret_cast<const Unit16*>(source + byte), target + byte);
    } else {
      for (int64_t byte = lane * 2; byte < rows.row_bytes; byte += kCopyLanes * 2)
        *reinterpret_cast<uint16_t*>(target + byte) = *reinterpret_cast<const uint16_t*>(source + byte);
    }
  });
}

struct CachedStores {
  const ByteRows* stores;

  TORCHREC_DYN_BOTH void copy(const RowCache& cache, int64_t from, int64_t to) const {
    for (int64_t s = cache.first_store; s < cache.first_store + cache.stores; ++s) copy_row(stores[s], from, to);
  }
};

struct WriteBackRows {
  static constexpr int kLanes = kCopyLanes;
  RowCaches all;
  CachedStores stores;

  TORCHREC_DYN_BOTH bool is_item(int64_t i) const {
    const RowCache& cache = all.of_frame(i);
    return cache.is_leaving(i - cache.first_frame);
  }
  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const RowCache& cache = all.of_frame(i);
    const int64_t frame = i - cache.first_frame;
    stores.copy(cache, cache.base + frame, cache.owners[frame]);
  }
};

struct FreeFrames {
  RowCaches all;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const RowCache& cache = all.of_frame(i);
    const int64_t frame = i - cache.first_frame;
    if (!cache.is_leaving(frame)) return;
    cache.places[cache.owners[frame]] = 0;
    cache.owners[frame] = -1;
    const int64_t place = cache.free_frames() + simt::atomic_add(&cache.plan->written, 1);
    if (place < cache.frames) cache.free[place] = static_cast<int32_t>(frame);
  }
};

// Of the missing rows of a table the first get frames: those that were freed last, then new ones.
struct AssignFrames {
  RowCaches all;
  const int64_t* missing;
  int64_t* frames;  // of each missing row, -1 for none

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const RowCache& cache = all.of_row(i);
    const int64_t place = i - cache.begin;
    frames[i] = -1;
    if (!cache.has_position(i) || place >= cache.plan->missing) return;
    const int64_t row = missing[i], free = lesser_of(cache.free_frames() + cache.plan->written, cache.frames);
    const int64_t frame = place < free ? cache.free[free - 1 - place] : cache.used_frames() + place - free;
    const bool has_frame = static_cast<uint64_t>(frame) < static_cast<uint64_t>(cache.frames);
    cache.places[row] = has_frame ? static_cast<int32_t>(frame + 1) : 0;
    if (!has_frame) return;
    cache.owners[frame] = row;
    cache.used[frame] = static_cast<int32_t>(cache.now);
    frames[i] = frame;
  }
};

struct LoadRows {
  static constexpr int kLanes = kCopyLanes;
  RowCaches all;
  CachedStores stores;
  const int64_t* missing;
  const int64_t* frames;

  TORCHREC_DYN_BOTH bool is_item(int64_t i) const { return frames[i] >= 0; }
  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const RowCache& cache = all.of_row(i);
    stores.copy(cache, missing[i], cache.base + frames[i]);
  }
};

struct FinishPlans {
  RowCaches all;
  bool loads;

  TORCHREC_DYN_BOTH void operator()(int64_t c) const {
    const RowCache& cache = all.caches[c];
    const int64_t used = cache.used_frames();
    const int64_t free = lesser_of(cache.free_frames() + cache.plan->written, cache.frames);
    const int64_t given = lesser_of(cache.plan->missing, free + cache.frames - used);
    const int64_t again = lesser_of(given, free);
    cache.counts[kFreeFrames] = free - again;
    cache.counts[kUsedFrames] = used + given - again;
    // These two may hold any number: an atomic sum wraps around.
    if (loads) simt::atomic_add(cache.counts + kLoadedRows, given);
    simt::atomic_add(cache.counts + kWrittenRows, cache.plan->written);
  }
};

// Where rows are: the row itself, or its frame. Rows of tables without a cache stay.
struct WritePlaces {
  RowCaches all;
  const int64_t* rows;
  int64_t* places;

  TORCHREC_DYN_BOTH void operator()(int64_t i) const {
    const int64_t row = places[i] = rows[i];
    if (all.count == 0) return;
    const RowCache& cache = all.of_row(i);
    const int64_t frame = cache.has_position(i) && cache.has_row(row) ? cache.frame_of(row) : -1;
    if (frame >= 0) places[i] = cache.base + frame;
  }
};

}  // namespace torchrec_dyn
