// Runs tasks on the threads of torch. Tasks are handed out one by one, so that uneven tasks leave no thread idle.
// Any thread may run a task; tasks must not write the same memory.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

namespace torchrec_dyn {

inline int64_t thread_count() { return static_cast<int64_t>(torch::stable::get_num_threads()); }

// The number of threads that share some tasks.
inline int64_t worker_count(int64_t tasks) { return thread_count() < tasks ? thread_count() : tasks; }

// Calls task(i, worker) for every i; the tasks of one worker, a number below `workers`, run one after the other. An
// exception of a task is thrown here, the first if there are several; then some tasks have not run.
template <typename Task>
void for_each_task_of(int64_t workers, int64_t tasks, const Task& task) {
  if (workers <= 1) {
    for (int64_t i = 0; i < tasks; ++i) task(i, int64_t{0});
    return;
  }
  std::atomic<int64_t> next{0};
  std::exception_ptr failure;
  std::mutex mutex;
  torch::stable::parallel_for(0, workers, 1, [&](int64_t worker, int64_t) {
    try {
      for (int64_t i = next.fetch_add(1); i < tasks; i = next.fetch_add(1)) task(i, worker);
    } catch (...) {  // torch would throw another exception in its place, without the message
      next = tasks;
      const std::lock_guard<std::mutex> lock(mutex);
      if (!failure) failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

template <typename Task>
void for_each_task(int64_t tasks, const Task& task) {
  for_each_task_of(worker_count(tasks), tasks, [&](int64_t i, int64_t) { task(i); });
}

// As for_each_task, for tasks that write memory for the first time, in the order of the tasks. Tasks that run at the
// same time are far apart: two threads that write one fresh 2 MiB page at the same time both make the system zero a
// page.
template <typename Task>
void for_each_task_apart(int64_t tasks, const Task& task) {
  const int64_t workers = worker_count(tasks);
  const int64_t stretch = workers < 1 ? 0 : (tasks + workers - 1) / workers;
  for_each_task(workers * stretch, [&](int64_t i) {
    const int64_t apart = i % workers * stretch + i / workers;
    if (apart < tasks) task(apart);
  });
}

// Cuts [0, size) into pieces of at least `grain` and runs task(begin, end) on each.
template <typename Task>
void for_each_range(int64_t size, int64_t grain, const Task& task) {
  const int64_t wanted = 8 * thread_count();
  const int64_t even = (size + wanted - 1) / wanted;
  const int64_t piece = even < grain ? grain : even;
  if (thread_count() <= 1 || size <= piece) {
    if (size > 0) task(int64_t{0}, size);
    return;
  }
  for_each_task((size + piece - 1) / piece, [&](int64_t i) {
    const int64_t begin = i * piece;
    task(begin, begin + piece < size ? begin + piece : size);
  });
}

}  // namespace torchrec_dyn
