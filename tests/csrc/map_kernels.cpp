// The kernels of the id map on the threads of the simt build (simt.h), in small maps, some of them full, where
// threads meet in the same lines, words and runs. Built with ThreadSanitizer, and with AddressSanitizer and UBSan, by
// `run`.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <vector>

#include "philox.h"
#include "sharing.h"
#include "simt_cpu.h"
#include "storage/canonical_ids_kernels.h"
#include "storage/collect_new_kernels.h"
#include "storage/id_map_kernels.h"

namespace torchrec_dyn {
namespace {

using Words = std::vector<int64_t>;
const simt::Stream kStream{nullptr, nullptr};

const SlotHash kHash = SlotHash::of(7);

int64_t size_of(const Words& words) { return static_cast<int64_t>(words.size()); }

// Distinct ids in no order, the ends of int64 among them.
Words distinct_ids(uint64_t seed, int64_t count) {
  Words ids;
  for (int64_t i = 0; i < count - 2; ++i)
    ids.push_back(static_cast<int64_t>(mix64(seed << 32 | static_cast<uint64_t>(i))));
  ids.push_back(std::numeric_limits<int64_t>::min());
  ids.push_back(std::numeric_limits<int64_t>::max());
  return ids;
}

// As many ids out of `ids`, many of them several times.
Words repeated(uint64_t seed, const Words& ids) {
  Words drawn;
  for (int64_t i = 0; i < size_of(ids); ++i) {
    const auto word = random_words(seed, i, 0, 0).words[0];
    drawn.push_back(ids[word % ids.size() % (word % 2 == 0 ? ids.size() : 1 + ids.size() / 8)]);
  }
  return drawn;
}

void insert(const SlotArray& array, const Words& ids, const Words& rows) {
  const TableMap map{IdMapView(array, kHash), 0};
  int64_t first_bad = 0;
  Words error(kErrorWords);
  simt::launch(kStream, size_of(ids), CheckRows{rows.data(), size_of(ids), &first_bad});
  simt::launch(kStream, size_of(ids),
               InsertIds{ids.data(), rows.data(), size_of(ids), {&map, 1}, &first_bad, {error.data(), 1}});
  check(first_bad == 0 && error == Words(kErrorWords), "every id finds a slot");
}

void erase(const SlotArray& array, const Words& ids, Words& rows) {
  Words slots(ids.size());
  const TableMap map{IdMapView(array, kHash), 0};
  const LeavingIds leaving{ids.data(), size_of(ids), {&map, 1}, slots.data()};
  simt::launch(kStream, size_of(ids), FindLeaving{leaving, rows.data(), nullptr});
  simt::launch(kStream, size_of(ids), MarkLeaving{leaving});
  simt::launch(kStream, size_of(ids), FirstOfRun{leaving, rows.data()});
  simt::launch(kStream, size_of(ids), CloseGaps{leaving});
}

// Compares the map with `rows_of`.
void find(const SlotArray& array, const Words& ids, const std::unordered_map<int64_t, int64_t>& rows_of) {
  const TableMap map{IdMapView(array, kHash), 0};
  Words rows(ids.size()), absent(1);
  int64_t error = 1;
  simt::launch(kStream, size_of(ids),
               FindRows{ids.data(), {&map, 1}, nullptr, nullptr, rows.data(), absent.data(), &error});
  check(absent[0] < 0, "an error is passed on");
  absent[0] -= kErrorMark;
  for (size_t i = 0; i < ids.size(); ++i) {
    const auto known = rows_of.find(ids[i]);
    check(rows[i] == (known == rows_of.end() ? kNoRow : known->second), "the map finds what the oracle finds");
  }
  check(absent[0] == std::count(rows.begin(), rows.end(), kNoRow), "absent ids are counted");
  Words places(static_cast<size_t>(array.capacity / kLineSlots) + 1);
  const IdsInside found{AllSlots(IdMapView(array, kHash)), 0, ~uint64_t{0}, places.data()};
  simt::launch(kStream, size_of(places), CountInside{found});
  simt::exclusive_sum(kStream, places.data(), size_of(places));
  check(places.back() == static_cast<int64_t>(rows_of.size()), "the map holds what the oracle holds");
  int64_t rows_end = 0;
  for (const auto& [id, row] : rows_of) rows_end = std::max(rows_end, row + 1);
  Words by_row(static_cast<size_t>(rows_end));
  std::vector<uint8_t> has_id(by_row.size());
  simt::launch(kStream, array.capacity, WriteIdsOfRows{array, 0, rows_end, by_row.data(), has_id.data()});
  for (const auto& [id, row] : rows_of)
    check(has_id[static_cast<size_t>(row)] == 1 && by_row[static_cast<size_t>(row)] == id, "each row has its id");
  check(std::ranges::count(has_id, 1) == places.back(), "no other row has an id");
  Words lengths(3);
  simt::launch(kStream, kProbeThreads, SumProbeLengths{array, kHash, 1, lengths.data()});
  check(lengths[0] == places.back() && lengths[2] <= array.capacity, "probe lengths are those of the ids");
}

void change_maps() {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const int64_t count = seed % 2 == 0 ? 64 : 2000;
    const int64_t capacity = seed % 4 < 2 ? count : count * 5 / 4;  // full, or with long runs
    const Words ids = distinct_ids(seed, count);
    Words rows(ids.size());
    std::iota(rows.begin(), rows.end(), int64_t{0});
    std::vector<Slot> slots(static_cast<size_t>(capacity)), grown(static_cast<size_t>(capacity + kLineSlots));
    const SlotArray array{slots.data(), capacity}, larger{grown.data(), capacity + kLineSlots};
    insert(array, ids, rows);
    std::unordered_map<int64_t, int64_t> rows_of;
    for (size_t i = 0; i < ids.size(); ++i) rows_of[ids[i]] = rows[i];
    find(array, ids, rows_of);

    const Words erased = repeated(seed, ids);
    Words former(erased.size());
    erase(array, erased, former);
    for (size_t i = 0; i < erased.size(); ++i) {
      const auto known = rows_of.extract(erased[i]);
      check(former[i] == (known.empty() ? kNoRow : known.mapped()), "the first of equal ids has the row");
    }
    find(array, ids, rows_of);

    int64_t left_out = 0;
    simt::launch(kStream, capacity, MoveSlots{array, larger, kHash, &left_out});
    check(left_out == 0, "every id finds a slot");
    find(larger, ids, rows_of);
  }
}

void collect_new() {
  const Words ids = repeated(7, distinct_ids(7, 5000));
  const int64_t count = size_of(ids);
  const Words rows(ids.size(), kNoRow), offsets{0, 1000, 1000, count};
  Words words(2 * ids.size()), index(ids.size()), times(ids.size()), places(ids.size() + 1), ends(4);
  const NewIds found{kHash, ids.data(),   rows.data(),  offsets.data(), 3,
                     count, words.data(), index.data(), times.data(),   places.data()};
  simt::launch(kStream, count, ClaimWords{found});
  simt::launch(kStream, count + 1, CountFirsts{found});
  simt::exclusive_sum(kStream, places.data(), count + 1);
  simt::launch(kStream, size_of(ends), ReadOffsets{found, ends.data()});
  Words new_ids(static_cast<size_t>(ends[3])), new_counts(new_ids.size());
  simt::launch(kStream, count, ListNew{found, new_ids.data(), new_counts.data()});
  for (size_t i = 0, next = 0; i < ids.size(); ++i) {
    const auto place = static_cast<size_t>(index[i]);
    check(place <= next && new_ids[place] == ids[i], "new ids are in the order of first sight");
    next += place == next;
  }
  check(std::reduce(new_counts.begin(), new_counts.end()) == count, "all occurrences are counted");
}

}  // namespace
}  // namespace torchrec_dyn

int main() {
  torchrec_dyn::change_maps();
  torchrec_dyn::collect_new();
  std::puts("map_kernels: ok");
}
