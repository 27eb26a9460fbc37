// Shared code of the sanitizers' programs: one thread for each piece, and an exit with a message if a rule is broken.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace torchrec_dyn {

constexpr int64_t kThreads = 4;

inline void check(bool holds, const char* rule) {
  if (holds) return;
  std::fprintf(stderr, "sanitize: expected that %s.\n", rule);
  std::exit(1);
}

template <typename Task>
void on_threads(const Task& task) {
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < kThreads; ++t) threads.emplace_back(task, t);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace torchrec_dyn
