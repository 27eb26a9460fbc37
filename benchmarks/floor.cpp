// The physical floor of a lookup: reads the rows of a batch and does nothing else. No ids, no hash, no bags.
// floor.py compiles this for the machine it runs on.
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// One cache line as a vector; a row is a whole number of lines.
typedef uint64_t Line __attribute__((vector_size(64)));
constexpr int64_t kLine = 64;

struct Table {
  const char* const* blocks;
  int64_t shift;
  int64_t row_bytes;

  const char* row(int64_t number) const {
    return blocks[number >> shift] + (number & ((int64_t{1} << shift) - 1)) * row_bytes;
  }
  // Into the second-level cache: random reads are limited by the few buffers of the first level.
  void prefetch(int64_t number) const {
    const char* line = row(number);
    for (int64_t byte = 0; byte < row_bytes; byte += kLine) __builtin_prefetch(line + byte, 0, 2);
  }
};

Line load(const char* from) {
  Line line;
  std::memcpy(&line, from, kLine);
  return line;
}

// Visits the rows numbers[begin, end) and prefetches each row `ahead` visits before its own.
template <typename Visit>
void visit_rows(const Table& table, const int64_t* numbers, int64_t begin, int64_t end, int64_t ahead,
                const Visit& visit) {
  for (int64_t i = begin; i < end && i < begin + ahead; ++i) table.prefetch(numbers[i]);
  for (int64_t i = begin; i < end; ++i) {
    if (i + ahead < end) table.prefetch(numbers[i + ahead]);
    visit(i, table.row(numbers[i]));
  }
}

}  // namespace

extern "C" {

// Reads rows [N] of `tables` tables; the rows of table t are rows[offsets[t], offsets[t + 1]). With `out`
// [N, row_bytes] they are copied there; without, they are added into one register, and the sum is returned so that
// no compiler drops the reads. Each thread takes a range of tables. Table t's blocks start at blocks[first_block[t]].
uint64_t gather_floor(const int64_t* rows, const int64_t* offsets, int64_t tables, const char* const* blocks,
                      const int64_t* first_block, const int64_t* shifts, int64_t row_bytes, char* out, int64_t ahead,
                      int64_t threads) {
  std::vector<Line> sums(static_cast<size_t>(threads), Line{});
  const auto work = [&](int64_t thread) {
    Line sum{};
    for (int64_t t = tables * thread / threads; t < tables * (thread + 1) / threads; ++t) {
      const Table table{blocks + first_block[t], shifts[t], row_bytes};
      if (out == nullptr) {
        visit_rows(table, rows, offsets[t], offsets[t + 1], ahead, [&](int64_t, const char* row) {
          for (int64_t byte = 0; byte < row_bytes; byte += kLine) sum += load(row + byte);
        });
      } else {
        visit_rows(table, rows, offsets[t], offsets[t + 1], ahead, [&](int64_t i, const char* row) {
          for (int64_t byte = 0; byte < row_bytes; byte += kLine) {
            const Line line = load(row + byte);
            std::memcpy(out + i * row_bytes + byte, &line, kLine);
          }
        });
      }
    }
    sums[static_cast<size_t>(thread)] = sum;
  };
  std::vector<std::thread> others;
  for (int64_t thread = 1; thread < threads; ++thread) others.emplace_back(work, thread);
  work(0);
  for (std::thread& other : others) other.join();
  uint64_t total = 0;
  for (const Line& sum : sums)
    for (int word = 0; word < 8; ++word) total += sum[word];
  return total;
}

}  // extern "C"
