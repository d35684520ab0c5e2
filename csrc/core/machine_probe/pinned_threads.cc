#include "core/machine_probe/pinned_threads.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <exception>
#include <thread>

namespace llmopt::machine_probe {
namespace {

void pin([[maybe_unused]] int cpu) {
#if defined(__linux__)
  if (cpu < 0 || cpu >= CPU_SETSIZE) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof(set), &set);  // refused for a CPU that this process may not use: it runs elsewhere then
#endif
}

}  // namespace

void SpinBarrier::pause(int spins) {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
  if (spins % 4096 == 4095) std::this_thread::yield();
}

void run_pinned(const std::vector<int>& cpus, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> errors(cpus.size());
  std::vector<std::thread> threads;
  for (size_t thread = 0; thread < cpus.size(); ++thread) {
    threads.emplace_back([&, thread] {
      pin(cpus[thread]);
      try {
        body(static_cast<int>(thread));
      } catch (...) {
        errors[thread] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace llmopt::machine_probe
