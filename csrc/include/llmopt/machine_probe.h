// What this machine can do: bytes read per second for a working set, operations per second for a kind of arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace llmopt {

// Memory that is read again and again. It lies on huge pages where the system gives them, and every thread has written
// the part that it reads, so that with several memory nodes each thread reads from its own.
class BandwidthProbe {
 public:
  // max_bytes: the largest working set that will be measured; rounded up to whole huge pages.
  // cpus: one entry per thread that may ever be used; each thread is bound to its CPU while it measures. A CPU that
  // this process may not use is left to the system.
  // Throws std::invalid_argument without bytes or CPUs, std::bad_alloc when there is no memory.
  BandwidthProbe(size_t max_bytes, std::vector<int> cpus);
  ~BandwidthProbe();
  BandwidthProbe(const BandwidthProbe&) = delete;
  BandwidthProbe& operator=(const BandwidthProbe&) = delete;

  // Bytes per second of the fastest pass over a working set that num_threads threads read together, each its part.
  // Passes are repeated for about `seconds`, three at least. What was read is added up and compared with what was
  // written. Throws std::invalid_argument for more bytes or threads than were announced.
  double measure(size_t bytes, int num_threads, double seconds);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Kinds of arithmetic that the selected instruction set has, in the order float32, bfloat16_dot, bfloat16_tile,
// int8_dot, int8_tile.
std::vector<std::string> peak_kinds();

// Operations per second (a multiplication and an addition are two) with all values in registers, on one thread per
// entry of cpus, which is bound to that CPU. The best of several repetitions within about `seconds`.
// Throws std::invalid_argument for a kind that is not in peak_kinds().
double measure_peak(std::string_view kind, const std::vector<int>& cpus, double seconds);

}  // namespace llmopt
