// CUDA kernels on the threads of the simt build (simt.h), on data where threads of one launch meet at the
// same words. Built with ThreadSanitizer, and with AddressSanitizer and UBSan, by `run`; a third time with
// a copy of the core in which atomic_cas is a plain store: ThreadSanitizer must report it.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <numeric>
#include <vector>

#include "philox.h"
#include "sharing.h"
#include "simt_cpu.h"
#include "storage/id_map_kernels.h"

namespace torchrec_dyn {
namespace {

const simt::Stream kStream{nullptr, nullptr};

// Ids that repeat often, and the ends of int64.
std::vector<int64_t> some_ids(int64_t n, int64_t distinct) {
  std::vector<int64_t> ids{std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()};
  for (int64_t i = 2; i < n; ++i) ids.push_back(random_words(1, i, 0, 0).words[0] % distinct - distinct / 2);
  return ids;
}

void mix_ids() {
  const std::vector<int64_t> ids = some_ids(10001, 3000);
  std::vector<uint64_t> given(ids.begin(), ids.end()), mixed(ids.size());
  simt::launch(kStream, static_cast<int64_t>(ids.size()), MixIds{given.data(), mixed.data()});
  for (size_t i = 0; i < given.size(); ++i) check(unmix64(mixed[i]) == given[i], "unmix64 is the inverse of mix64");
}

// Every function of simt.h that accesses a word: threads claim places of a full array, count each place's attempts, and
// lower one word to the first thread that found a place taken.
struct MeetAtWords {
  int64_t* places;
  int64_t* attempts;
  int64_t* first_conflict;
  int64_t count;

  void operator()(int64_t i) const {
    int64_t place = (i / 8) % count;
    for (int64_t step = 0; step < count; ++step, place = (place + 1) % count) {
      simt::atomic_add(&attempts[place], 1);
      if (simt::load(&places[place]) == 0 && simt::atomic_cas(&places[place], 0, i + 1) == 0) return;
      simt::atomic_min(first_conflict, i);
    }
  }
};

void meet_at_words() {
  constexpr int64_t kCount = 4099;
  std::vector<int64_t> places(kCount), attempts(kCount);
  int64_t first_conflict = kCount;
  simt::launch(kStream, kCount, MeetAtWords{places.data(), attempts.data(), &first_conflict, kCount});
  std::ranges::sort(places);
  for (int64_t i = 0; i < kCount; ++i) check(places[static_cast<size_t>(i)] == i + 1, "every thread has a place");
  check(std::ranges::min(attempts) > 0, "every place is counted");
  check(std::reduce(attempts.begin(), attempts.end()) >= kCount, "every attempt is counted");
  check(first_conflict < 8, "the first conflict is the lowest one");
}

template <typename Pairs, typename Key, typename Place>
void sort_by_some_bits() {
  constexpr int64_t kCount = 1000;
  std::vector<Key> keys;
  for (int64_t i = 0; i < kCount; ++i)
    keys.push_back(static_cast<Key>(random_words(2, i, 0, 0).words[0]) | Key{1} << (8 * sizeof(Key) - 1));
  std::vector<Place> places(kCount);
  std::iota(places.begin(), places.end(), Place{0});
  const std::vector<Key> given = keys;
  const Pairs sorted = simt::sort_pairs(kStream, Pairs{keys.data(), places.data()}, kCount, 3, 7);
  const auto bits = [](Key key) { return key >> 3 & 15; };
  for (int64_t i = 0; i < kCount; ++i) {
    check(sorted.keys[i] == given[static_cast<size_t>(sorted.values[i])], "values move with their keys");
    if (i == 0) continue;
    check(bits(sorted.keys[i - 1]) <= bits(sorted.keys[i]), "keys ascend by their bits");
    check(bits(sorted.keys[i - 1]) < bits(sorted.keys[i]) || sorted.values[i - 1] < sorted.values[i],
          "pairs with equal bits stay in their order");
  }
}

}  // namespace
}  // namespace torchrec_dyn

int main() {
  using namespace torchrec_dyn;
  mix_ids();
  meet_at_words();
  sort_by_some_bits<simt::Pairs, uint64_t, int64_t>();
  sort_by_some_bits<simt::PairsOf<uint32_t, uint32_t>, uint32_t, uint32_t>();
  std::puts("kernels: ok");
}
