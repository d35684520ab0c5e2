// Threads of our own for work that meets at a barrier hundreds of times per step.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "llmopt/parallel.h"

namespace llmopt {

struct ThreadTeamOptions {
  int num_threads = 1;    // the caller of run() is one of them
  std::vector<int> cpus;  // where the workers may run; empty: wherever this process may
  bool pin = true;        // bind each worker to one CPU
  int spin_us = 200;      // a worker without work spins so long before it sleeps
};

// One run() at a time; a second caller waits. Workers start with the first run() and end with the object; in a forked
// child they are started again.
class ThreadTeam {
 public:
  explicit ThreadTeam(ThreadTeamOptions options);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const;

  // Run body(thread, size()) on every thread, the caller being thread 0, and wait for all.
  // The body must not throw.
  void run(TeamFunction body);

  // Inside of run(): wait until all threads have come here. What they wrote before is seen by all after.
  void barrier();
  // Meanwhile the cache lines of `ahead` are fetched, from its beginning on; it is left with those that were not.
  void barrier(std::span<const std::byte>& ahead);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace llmopt
