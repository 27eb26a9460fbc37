// The physical floors of a lookup, an update and an insertion: they touch the memory that a batch must touch and do
// nothing else.
// No ids, no hash, no bags, no dedupe. floor.py compiles this for the machine it runs on.
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kLine = 64;  // a row is a whole number of cache lines

// A register of this machine. A wider vector would stand in memory.
#if defined(__AVX512F__)
constexpr int64_t kPart = 64;
#elif defined(__AVX2__)
constexpr int64_t kPart = 32;
#else
constexpr int64_t kPart = 16;
#endif
typedef uint64_t Part __attribute__((vector_size(kPart)));

// GCC takes a function that only prefetches for a function without effect, and drops its calls.
#define ALWAYS_INLINE __attribute__((always_inline))

struct Table {
  char* const* blocks;
  int64_t shift;
  int64_t row_bytes;

  char* row(int64_t number) const {
    return blocks[number >> shift] + (number & ((int64_t{1} << shift) - 1)) * row_bytes;
  }
  // Into the second-level cache: random reads are limited by the few buffers of the first level.
  ALWAYS_INLINE void prefetch(int64_t number) const {
    const char* line = row(number);
    for (int64_t byte = 0; byte < row_bytes; byte += kLine) __builtin_prefetch(line + byte, 0, 2);
  }
};

Part load(const char* from) {
  Part part;
  std::memcpy(&part, from, kPart);
  return part;
}

// Calls visit(i) for i in [begin, end), and prefetch(i) `ahead` visits before.
template <typename Prefetch, typename Visit>
ALWAYS_INLINE inline void visit_ahead(int64_t begin, int64_t end, int64_t ahead, const Prefetch& prefetch,
                                      const Visit& visit) {
  for (int64_t i = begin; i < end && i < begin + ahead; ++i) prefetch(i);
  for (int64_t i = begin; i < end; ++i) {
    if (i + ahead < end) prefetch(i + ahead);
    visit(i);
  }
}

template <typename Visit>
ALWAYS_INLINE inline void visit_rows(const Table& table, const int64_t* numbers, int64_t begin, int64_t end,
                                     int64_t ahead, const Visit& visit) {
  const auto prefetch = [&](int64_t i) ALWAYS_INLINE { table.prefetch(numbers[i]); };
  visit_ahead(begin, end, ahead, prefetch, [&](int64_t i) { visit(i, table.row(numbers[i])); });
}

// Calls work(thread, first table, last table); each thread takes a range of tables.
template <typename Work>
void on_threads(int64_t tables, int64_t threads, const Work& work) {
  const auto run = [&](int64_t thread) { work(thread, tables * thread / threads, tables * (thread + 1) / threads); };
  std::vector<std::thread> others;
  for (int64_t thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
  run(0);
  for (std::thread& other : others) other.join();
}

}  // namespace

// In all floors the rows of table t are rows[offsets[t], offsets[t + 1]), and its blocks start at
// blocks[first_block[t]].
extern "C" {

// Reads rows [N]. With `out` [N, row_bytes] they are copied there; without, they are added into one register, and the
// sum is returned so that no compiler drops the reads.
uint64_t gather_floor(const int64_t* rows, const int64_t* offsets, int64_t tables, char* const* blocks,
                      const int64_t* first_block, const int64_t* shifts, int64_t row_bytes, char* out, int64_t ahead,
                      int64_t threads) {
  std::vector<Part> sums(static_cast<size_t>(threads), Part{});
  on_threads(tables, threads, [&](int64_t thread, int64_t first, int64_t last) {
    Part sum{};
    for (int64_t t = first; t < last; ++t) {
      const Table table{blocks + first_block[t], shifts[t], row_bytes};
      if (out == nullptr) {
        visit_rows(table, rows, offsets[t], offsets[t + 1], ahead, [&](int64_t, const char* row) {
          for (int64_t byte = 0; byte < row_bytes; byte += kPart) sum += load(row + byte);
        });
      } else {
        visit_rows(table, rows, offsets[t], offsets[t + 1], ahead, [&](int64_t i, const char* row) {
          for (int64_t byte = 0; byte < row_bytes; byte += kPart) {
            const Part part = load(row + byte);
            std::memcpy(out + i * row_bytes + byte, &part, kPart);
          }
        });
      }
    }
    sums[static_cast<size_t>(thread)] = sum;
  });
  uint64_t total = 0;
  for (const Part& sum : sums)
    for (size_t word = 0; word < kPart / sizeof(uint64_t); ++word) total += sum[word];
  return total;
}

// Reads the slot of each id, whose place in the map of its table is known: out [N] = row.
void probe_floor(const int64_t* places, const int64_t* offsets, int64_t tables, char* const* maps, int64_t* out,
                 int64_t ahead, int64_t threads) {
  on_threads(tables, threads, [&](int64_t, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t)
      visit_rows(Table{maps + t, 62, 16}, places, offsets[t], offsets[t + 1], ahead, [&](int64_t i, const char* slot) {
        std::memcpy(out + i, slot + sizeof *out, sizeof *out);
        --out[i];
      });
  });
}

// For each id, in the order of the batch: reads the gradient of its bag, grad + grad_places[i], adds `rate` to the
// state of its row, and subtracts `rate` times the gradient from the row.
void update_floor(const int64_t* rows, const int64_t* offsets, int64_t tables, char* const* blocks, char* const* states,
                  const int64_t* first_block, const int64_t* shifts, int64_t columns, const float* grad,
                  const int64_t* grad_places, float rate, int64_t ahead, int64_t threads) {
  on_threads(tables, threads, [&](int64_t, int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const Table weights{blocks + first_block[t], shifts[t], columns * int64_t{sizeof(float)}};
      const Table state{states + first_block[t], shifts[t], sizeof(float)};
      visit_ahead(
          offsets[t], offsets[t + 1], ahead,
          [&](int64_t i) ALWAYS_INLINE {
            weights.prefetch(rows[i]);
            state.prefetch(rows[i]);
            if (i > offsets[t] && grad_places[i] == grad_places[i - 1]) return;
            for (int64_t c = 0; c < columns; c += 16) __builtin_prefetch(grad + grad_places[i] + c, 0, 2);
          },
          [&](int64_t i) {
            auto* row = reinterpret_cast<float*>(weights.row(rows[i]));
            const float* from = grad + grad_places[i];
            *reinterpret_cast<float*>(state.row(rows[i])) += rate;
            for (int64_t c = 0; c < columns; ++c) row[c] -= rate * from[c];
          });
    }
  });
}

// Writes every byte of `memory`, which no one has written before: each thread a stretch of its own.
void fresh_floor(char* memory, int64_t bytes, int64_t threads) {
  on_threads(bytes, threads, [&](int64_t, int64_t first, int64_t last) {
    std::memset(memory + first, 1, static_cast<size_t>(last - first));
  });
}

// Adds `by` to the word of each row of one table. Thread t takes rows[offsets[t], offsets[t + 1]); no two threads have
// the same row.
void word_floor(const int64_t* rows, const int64_t* offsets, char* const* blocks, int64_t shift, uint64_t by,
                int64_t ahead, int64_t threads) {
  const Table words{blocks, shift, sizeof(uint64_t)};
  on_threads(threads, threads, [&](int64_t thread, int64_t, int64_t) {
    visit_ahead(
        offsets[thread], offsets[thread + 1], ahead, [&](int64_t i) ALWAYS_INLINE { words.prefetch(rows[i]); },
        [&](int64_t i) { *reinterpret_cast<uint64_t*>(words.row(rows[i])) += by; });
  });
}

// Sets the bit of each row of one table. Thread t takes rows[offsets[t], offsets[t + 1]); no two threads have rows of
// the same line.
void bit_floor(const int64_t* rows, const int64_t* offsets, uint8_t* bits, int64_t ahead, int64_t threads) {
  on_threads(threads, threads, [&](int64_t thread, int64_t, int64_t) {
    visit_ahead(
        offsets[thread], offsets[thread + 1], ahead,
        [&](int64_t i) ALWAYS_INLINE { __builtin_prefetch(bits + (rows[i] >> 3), 1, 2); },
        [&](int64_t i) { bits[rows[i] >> 3] |= static_cast<uint8_t>(1u << (rows[i] & 7)); });
  });
}

}  // extern "C"
