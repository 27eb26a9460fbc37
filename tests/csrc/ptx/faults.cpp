#include "faults.h"

#include <csetjmp>
#include <csignal>

namespace torchrec_dyn::ptx {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS};

struct Guard {
  sigjmp_buf jump;
  GridState* state;
  struct sigaction before[2];
};

// Signals of other threads, and those that no access of a kernel explains, go to whoever had them before.
thread_local Guard* guard_of_thread = nullptr;
constinit Guard* guard_of_process = nullptr;  // launches hold a lock

bool is_of_kernel(const Access& access, uintptr_t address) {
  return access.warp != nullptr && address >= access.address && address < access.address + access.bytes;
}

void on_signal(int, siginfo_t* info, void*) {
  Guard* guard = guard_of_thread;
  if (guard != nullptr && is_of_kernel(guard->state->access, reinterpret_cast<uintptr_t>(info->si_addr)))
    siglongjmp(guard->jump, 1);
  // The instruction runs again and meets the handler of before.
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &guard_of_process->before[i], nullptr);
}

}  // namespace

bool run_guarded(GridState& state, void (*body)(void*), void* argument) {
  Guard guard{};
  guard.state = &state;
  guard_of_thread = guard_of_process = &guard;
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &action, &guard.before[i]);
  struct Restore {
    Guard& guard;
    ~Restore() {
      guard_of_thread = nullptr;
      for (int i = 0; i < 2; ++i) sigaction(kSignals[i], &guard.before[i], nullptr);
    }
  } restore{guard};
  if (sigsetjmp(guard.jump, 1) != 0) return false;
  body(argument);
  return true;
}

}  // namespace torchrec_dyn::ptx
