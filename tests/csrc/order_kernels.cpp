// The kernels that sort, count and sum (simt.h) on the threads of the simt build: canonical order, cells, content sums
// and owners, where threads meet at the same words. Built with ThreadSanitizer, and with AddressSanitizer and UBSan, by
// `run`.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <numeric>
#include <vector>

#include "bag_lengths_kernels.h"
#include "philox.h"
#include "ranks/owners_kernels.h"
#include "sharing.h"
#include "simt_cpu.h"
#include "storage/canonical_ids_kernels.h"
#include "storage/content_sum_kernels.h"

namespace torchrec_dyn {
namespace {

using Words = std::vector<int64_t>;
const simt::Stream kStream{nullptr, nullptr};

int64_t size_of(const Words& words) { return static_cast<int64_t>(words.size()); }

// Two arrays of slots, as of a map that grows; a third of the slots is empty. The ids are distinct.
void list_and_count() {
  std::vector<Slot> slots(4000), outgoing(3000);
  std::vector<uint64_t> held;
  for (size_t i = 0; i < slots.size() + outgoing.size(); ++i) {
    Slot& slot = i < slots.size() ? slots[i] : outgoing[i - slots.size()];
    slot.id = static_cast<int64_t>(unmix64(static_cast<uint64_t>(i) * kGolden));
    slot.place = i % 3 == 0 ? 0 : static_cast<int64_t>(i);
    if (slot.place != 0) held.push_back(static_cast<uint64_t>(i) * kGolden);
  }
  std::ranges::sort(held);
  const AllSlots all(IdMapView({slots.data(), 4000}, {outgoing.data(), 3000}, 4, SlotHash{}));
  for (int bits : {0, 2, 16}) {
    Words counts(size_t{1} << bits), expected(counts.size());
    simt::launch(kStream, all.count, CountCells{all, bits, counts.data()});
    for (uint64_t mixed : held) ++expected[cell_of(mixed, bits)];
    check(counts == expected, "every id is counted in its cell");
  }
  const uint64_t first = held[500], last = held[4000];
  Words places(static_cast<size_t>(all.count / kLineSlots) + 1);
  const IdsInside found{all, first, last - first, places.data()};
  simt::launch(kStream, size_of(places), CountInside{found});
  simt::exclusive_sum(kStream, places.data(), size_of(places));
  check(places.back() == 3501, "every id inside is counted");
  std::vector<uint64_t> keys(3501);
  Words rows(keys.size());
  simt::launch(kStream, found.lines(), ListInside{found, keys.data(), rows.data()});
  const simt::Pairs listed{keys.data(), rows.data()};
  const simt::Pairs sorted = simt::sort_pairs(kStream, listed, size_of(rows));
  simt::launch(kStream, size_of(rows), UnmixListed{sorted, first, keys.data(), rows.data()});
  for (size_t i = 0; i < keys.size(); ++i)
    check(mix64(keys[i]) == held[500 + i] && rows[i] >= 0, "ids are in canonical order");
}

template <typename Unit, typename Bits>
void sum_contents() {
  constexpr int64_t kRows = 3000, kColumns = 24, kGroups = 700;
  std::vector<uint64_t> ids;
  for (int64_t i = 0; i < kRows; ++i) ids.push_back(random_words(5, i, 0, 0).words[0]);
  std::vector<Unit> values(kRows * kColumns * sizeof(Bits) / sizeof(Unit));
  auto* bytes = reinterpret_cast<unsigned char*>(values.data());
  for (size_t b = 0; b < values.size() * sizeof(Unit); ++b)
    bytes[b] = static_cast<unsigned char>(b * 2654435761u >> 24);
  const Division units(kColumns * static_cast<int64_t>(sizeof(Bits)) / static_cast<int64_t>(sizeof(Unit)));
  Words partial(kPartialSums);
  int64_t total = 0;
  simt::launch(kStream, kGroups * units.divisor,
               SumUnits<Unit, Bits>{ids.data(), values.data(), kRows, kGroups, units, 7, 99, partial.data()});
  simt::launch(kStream, kPartialSums, AddPartialSums{partial.data(), &total});
  const BitRows<Bits> rows{reinterpret_cast<const char*>(values.data()), kColumns};
  check(static_cast<uint64_t>(total) == content_sum_of(ids.data(), rows, kRows, kColumns, 7, 99),
        "the content sum is the CPU's");
}

// Bags of 0 to 40 ids, and the same ids in one bag.
template <typename Length>
void sort_by_owner(bool in_one_bag, int64_t ranks) {
  std::vector<Length> lengths;
  int64_t count = 0;
  while (count < 6000) {
    lengths.push_back(static_cast<Length>(lengths.size() * 7 % 41));
    count += lengths.back();
  }
  if (in_one_bag) lengths = {0, static_cast<Length>(count), 0};
  const auto bags = static_cast<int64_t>(lengths.size());
  Words ids;
  for (int64_t i = 0; i < count; ++i) ids.push_back(static_cast<int64_t>(mix64(static_cast<uint64_t>(i))));
  const auto* words = reinterpret_cast<const uint64_t*>(ids.data());
  const auto owners = static_cast<uint64_t>(ranks);
  const uint64_t share = std::numeric_limits<uint64_t>::max() / owners;

  Words begins(static_cast<size_t>(bags) + 1), order(ids.size()), sorted_ids(ids.size()), where(ids.size());
  std::vector<uint64_t> keys(ids.size());
  std::vector<Length> sorted_lengths(static_cast<size_t>(ranks * bags));
  int64_t is_wrong = 0;
  const Integers given{lengths.data(), sizeof(Length) == sizeof(int32_t)};
  const ReadLengths read{given, bags, count, begins.data(), &is_wrong};
  simt::launch(kStream, bags + 1, read);
  simt::exclusive_sum(kStream, begins.data(), bags + 1);
  const simt::Pairs pairs{keys.data(), order.data()};
  simt::launch(
      kStream, count + 1,
      FindOwners<Length>{words, count, begins.data(), bags, owners, share, pairs, sorted_lengths.data(), &is_wrong});
  const simt::Pairs sorted = simt::sort_pairs(kStream, pairs, count);
  int64_t error[kErrorWords] = {};
  const MoveToOwners<uint64_t> move{count,       sorted.values, ids.data(), words,     sorted_ids.data(),
                                    keys.data(), where.data(),  &is_wrong,  {error, 1}};
  simt::launch(kStream, count + 1, move);
  check(is_wrong == 0 && error[0] == 0, "the lengths add up");

  Words next(static_cast<size_t>(ranks));  // the place of the next id of each owner
  for (uint64_t word : std::vector<uint64_t>(words, words + count))
    for (uint64_t rank = owner_of(mix64(word), owners, share) + 1; rank < owners; ++rank) ++next[rank];
  std::vector<Length> expected(sorted_lengths.size());
  size_t i = 0;
  for (int64_t bag = 0; bag < bags; ++bag)
    for (Length k = 0; k < lengths[static_cast<size_t>(bag)]; ++k, ++i) {
      const uint64_t rank = owner_of(mix64(words[i]), owners, share);
      const auto place = static_cast<size_t>(next[rank]++);
      check(where[i] == static_cast<int64_t>(place) && sorted_ids[place] == ids[i] && keys[place] == words[i],
            "ids of an owner stay in their order");
      ++expected[rank * static_cast<size_t>(bags) + static_cast<size_t>(bag)];
    }
  check(sorted_lengths == expected, "ids are counted by owner and bag");

  Words copies(begins.size());
  const CopyOffsets copy_offsets{{begins.data(), false}, given, copies.data(), &is_wrong};
  simt::launch(kStream, bags + 1, copy_offsets);
  check(is_wrong == 0 && copies == begins, "offsets fit to their lengths");
  for (Length& length : lengths) ++length;
  simt::launch(kStream, bags + 1, copy_offsets);
  check(is_wrong != 0, "other lengths are found");

  is_wrong = 0;
  lengths.back() = -1;
  simt::launch(kStream, bags + 1, read);
  check(is_wrong != 0, "a negative length is found");
  move(count);
  check(error[0] == 1 && error[1] == count, "it is reported");
}

}  // namespace
}  // namespace torchrec_dyn

int main() {
  using namespace torchrec_dyn;
  list_and_count();
  sum_contents<Unit16, uint32_t>();
  sum_contents<uint32_t, uint32_t>();
  sum_contents<Unit16, uint16_t>();
  sum_contents<uint16_t, uint16_t>();
  sort_by_owner<int32_t>(false, 7);
  sort_by_owner<int64_t>(true, 2);
  std::puts("order_kernels: ok");
}
