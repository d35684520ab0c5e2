// Threads that start together, each bound to its CPU, for as long as one measurement takes.
#pragma once

#include <atomic>
#include <functional>
#include <vector>

namespace llmopt::machine_probe {

// A barrier that only spins: between two passes nothing may sleep.
class SpinBarrier {
 public:
  explicit SpinBarrier(int num_threads) : num_threads_(num_threads) {}

  void wait() {
    const int turn = turn_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; ++spins) pause(spins);
  }

 private:
  static void pause(int spins);  // gives the CPU away now and then, for machines with more threads than CPUs

  const int num_threads_;
  std::atomic<int> arrived_{0}, turn_{0};
};

// Run body(thread) on cpus.size() threads and wait for them; thread t is bound to cpus[t]. The calling thread is none
// of them, so its own binding stays. An exception of a body is thrown here; others must not wait for that thread then.
void run_pinned(const std::vector<int>& cpus, const std::function<void(int)>& body);

}  // namespace llmopt::machine_probe
