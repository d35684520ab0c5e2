// Prints what a barrier and a run() cost: thread_team_timing [num_threads]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "llmopt/thread_team.h"

namespace {

using Clock = std::chrono::steady_clock;

double ns(Clock::duration time) { return std::chrono::duration<double, std::nano>(time).count(); }

// Median of 21 repetitions of `body`, divided by `count`.
template <class Body>
double median_ns(int count, Body body) {
  std::vector<double> times;
  for (int i = 0; i < 21; ++i) {
    const auto start = Clock::now();
    body();
    times.push_back(ns(Clock::now() - start) / count);
  }
  std::ranges::nth_element(times, times.begin() + times.size() / 2);
  return times[times.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  llmopt::ThreadTeamOptions options;
  options.num_threads = argc > 1 ? std::atoi(argv[1]) : 2;
  llmopt::ThreadTeam team(options);
  team.run([](int, int) {});

  constexpr int kBarriers = 20000, kRuns = 5000;
  const double barrier = median_ns(kBarriers, [&] {
    team.run([&](int, int) {
      for (int i = 0; i < kBarriers; ++i) team.barrier();
    });
  });
  const double run = median_ns(kRuns, [&] {
    for (int i = 0; i < kRuns; ++i) team.run([](int, int) {});
  });
  std::vector<double> wakes;
  for (int i = 0; i < 31; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const auto start = Clock::now();
    team.run([](int, int) {});
    wakes.push_back(ns(Clock::now() - start));
  }
  std::ranges::nth_element(wakes, wakes.begin() + 15);
  std::printf("%d threads: barrier %.0f ns, run of threads that spin %.0f ns, of threads that sleep %.1f us\n",
              team.size(), barrier, run, wakes[15] / 1000);
}
