#include "llmopt/thread_team.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <set>
#include <span>
#include <stdexcept>
#include <thread>
#include <vector>

namespace llmopt {
namespace {

using std::chrono::milliseconds;

ThreadTeamOptions threads(int num_threads) {
  ThreadTeamOptions options;
  options.num_threads = num_threads;
  return options;
}

// More threads than this wait for time slices at every barrier.
int num_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof(set), &set);
  return CPU_COUNT(&set);
}

class ThreadTeamOfSize : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, ThreadTeamOfSize, testing::Values(1, 2, 3, 5, 8));

TEST_P(ThreadTeamOfSize, EachThreadRunsTheBodyOnce) {
  ThreadTeam team(threads(GetParam()));
  EXPECT_EQ(team.size(), GetParam());
  for (int round = 0; round < 50; ++round) {
    std::vector<int> runs(GetParam());
    team.run([&](int thread, int size) {
      EXPECT_EQ(size, GetParam());
      ++runs[thread];
    });
    for (int count : runs) ASSERT_EQ(count, 1);
  }
}

TEST_P(ThreadTeamOfSize, TheCallerIsThreadZero) {
  ThreadTeam team(threads(GetParam()));
  std::vector<std::thread::id> ids(GetParam());
  team.run([&](int thread, int) { ids[thread] = std::this_thread::get_id(); });
  EXPECT_EQ(ids[0], std::this_thread::get_id());
  EXPECT_EQ(std::set(ids.begin(), ids.end()).size(), ids.size());
}

// Plain memory: a barrier that let a thread through early, or did not publish, shows as a wrong sum (and in the thread
// sanitizer).
TEST_P(ThreadTeamOfSize, WhatWasWrittenBeforeABarrierIsSeenAfterIt) {
  const int num_barriers = GetParam() <= num_cpus() ? 20000 : 300;
  ThreadTeam team(threads(GetParam()));
  struct alignas(64) Cell {
    int64_t value = 0;
  };
  std::vector<Cell> cells(GetParam());
  std::vector<int64_t> errors(GetParam());
  team.run([&](int thread, int size) {
    for (int64_t round = 1; round <= num_barriers; ++round) {
      cells[thread].value = round;
      team.barrier();
      for (const Cell& cell : cells) errors[thread] += cell.value != round;
      team.barrier();
    }
    EXPECT_EQ(size, GetParam());
  });
  for (int64_t count : errors) EXPECT_EQ(count, 0);
}

TEST_P(ThreadTeamOfSize, WhatTheThreadsWroteIsSeenByTheCallerAndByTheNextRun) {
  ThreadTeam team(threads(GetParam()));
  std::vector<int> values(1000);
  const int num_runs = GetParam() <= num_cpus() ? 5000 : 200;
  for (int round = 1; round <= num_runs; ++round) {
    team.run([&](int thread, int size) {
      // Each run shifts the ranges, so that threads read what others wrote.
      for (size_t i = (thread + round) % size; i < values.size(); i += size) values[i] += 1;
    });
    ASSERT_EQ(values[round % values.size()], round);
  }
  for (int value : values) EXPECT_EQ(value, num_runs);
}

TEST(ThreadTeam, ItIsMadeOfAtLeastOneThread) {
  EXPECT_THROW(ThreadTeam team(threads(0)), std::invalid_argument);
  ThreadTeamOptions options = threads(2);
  options.spin_us = -1;
  EXPECT_THROW(ThreadTeam team(options), std::invalid_argument);
}

TEST(ThreadTeam, WorkersThatSleptWakeForTheNextRun) {
  ThreadTeamOptions options = threads(3);
  for (int spin_us : {0, 1, 100}) {
    options.spin_us = spin_us;
    ThreadTeam team(options);
    for (int round = 0; round < 20; ++round) {
      std::atomic<int> runs{0};
      team.run([&](int, int) { ++runs; });
      EXPECT_EQ(runs, 3);
      std::this_thread::sleep_for(milliseconds(round % 4));
    }
  }
}

TEST(ThreadTeam, AnIdleTeamTakesNoCpuTime) {
  ThreadTeam team(threads(3));
  team.run([](int, int) {});
  std::this_thread::sleep_for(milliseconds(20));
  const std::clock_t before = std::clock();
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_LT(std::clock() - before, CLOCKS_PER_SEC / 50);
}

TEST(ThreadTeam, ItEndsWhileItsWorkersSleepOrSpinOrHaveNotStarted) {
  {
    ThreadTeam team(threads(4));
  }
  for (int spin_us : {0, 50, 100000}) {
    ThreadTeamOptions options = threads(4);
    options.spin_us = spin_us;
    ThreadTeam team(options);
    team.run([](int, int) {});
    if (spin_us == 50) std::this_thread::sleep_for(milliseconds(5));
  }
}

TEST(ThreadTeam, ASecondCallerWaitsForTheFirst) {
  ThreadTeam team(threads(2));
  std::atomic<int> inside{0}, most{0}, runs{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        team.run([&](int thread, int) {
          if (thread == 0) most = std::max(most.load(), ++inside);
          team.barrier();
          if (thread == 0) --inside;
          ++runs;
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(most, 1);
  EXPECT_EQ(runs, 3 * 200 * 2);
}

TEST(ThreadTeam, TeamsDoNotDisturbEachOther) {
  ThreadTeam first(threads(2)), second(threads(3));
  std::atomic<int> runs{0};
  std::thread other([&] {
    for (int round = 0; round < 300; ++round) {
      second.run([&](int, int) {
        second.barrier();
        ++runs;
      });
    }
  });
  for (int round = 0; round < 300; ++round) {
    first.run([&](int, int) {
      first.barrier();
      ++runs;
    });
  }
  other.join();
  EXPECT_EQ(runs, 300 * 5);
}

TEST(ThreadTeam, InsideARunOfTheSameTeamTheBodyRunsOnTheCallerAlone) {
  ThreadTeam team(threads(3)), other(threads(2));
  std::atomic<int> inner{0}, outer{0};
  team.run([&](int thread, int) {
    team.run([&](int thread, int size) {
      EXPECT_EQ(thread, 0);
      EXPECT_EQ(size, 1);
      team.barrier();
      ++inner;
    });
    if (thread == 0) other.run([&](int, int) { ++outer; });
    team.barrier();
  });
  EXPECT_EQ(inner, 3);
  EXPECT_EQ(outer, 2);
}

TEST(ThreadTeam, ABarrierOutsideOfARunDoesNothing) {
  ThreadTeam team(threads(2));
  team.barrier();
  team.run([](int, int) {});
  team.barrier();
}

TEST(ThreadTeam, AThreadThatIsLateIsWaitedFor) {
  ThreadTeam team(threads(2));
  for (int late = 0; late < 2; ++late) {
    int value = 0;
    team.run([&](int thread, int) {
      if (thread == late) {
        std::this_thread::sleep_for(milliseconds(60));
        value = 1;
      }
      team.barrier();
      EXPECT_EQ(value, 1);
    });
  }
}

TEST(ThreadTeam, AThreadThatWaitsFetchesFromTheBeginningAndKeepsTheRest) {
  if (num_cpus() < 2) GTEST_SKIP() << "more threads than CPUs give way instead";
  ThreadTeam team(threads(2));
  const std::vector<std::byte> memory(1000);
  int value = 0;
  team.run([&](int thread, int) {
    std::span<const std::byte> ahead = memory, nothing;
    if (thread == 0) {
      std::this_thread::sleep_for(milliseconds(60));
      value = 1;
    }
    team.barrier(thread == 0 ? nothing : ahead);
    EXPECT_EQ(value, 1);
    EXPECT_EQ(ahead.size(), thread == 0 ? memory.size() : 0);
    EXPECT_EQ(ahead.data() + ahead.size(), memory.data() + memory.size());
  });
}

TEST(ThreadTeam, WorkersStayOnTheGivenCpusAndTheCallerIsNotBound) {
  cpu_set_t before, after;
  sched_getaffinity(0, sizeof(before), &before);
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE && cpus.size() < 2; ++cpu) {
    if (CPU_ISSET(cpu, &before)) cpus.push_back(cpu);
  }
  for (bool pin : {false, true}) {
    ThreadTeamOptions options = threads(static_cast<int>(cpus.size()) + 1);
    options.cpus = cpus;
    options.pin = pin;
    ThreadTeam team(options);
    std::atomic<int> strays{0};
    for (int round = 0; round < 10; ++round) {
      team.run([&](int thread, int) {
        if (thread > 0 && std::find(cpus.begin(), cpus.end(), sched_getcpu()) == cpus.end()) ++strays;
      });
    }
    EXPECT_EQ(strays, 0);
  }
  sched_getaffinity(0, sizeof(after), &after);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

TEST(ThreadTeam, AWorkerIsPinnedAwayFromTheCpuThatTheCallerIsOn) {
  if (num_cpus() < 2) GTEST_SKIP() << "one CPU";
  cpu_set_t before;
  sched_getaffinity(0, sizeof(before), &before);
  ThreadTeam team(threads(2));
  team.run([](int, int) {});
  int moves = 0;
  for (int cpu = 0, round = 0; cpu < CPU_SETSIZE && round < 4; ++cpu) {
    if (!CPU_ISSET(cpu, &before)) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof(one), &one);
    std::this_thread::sleep_for(milliseconds(2 * (round++ % 2)));
    cpu_set_t worker;
    team.run([&](int thread, int) {
      if (thread == 1) sched_getaffinity(0, sizeof(worker), &worker);
    });
    EXPECT_EQ(CPU_COUNT(&worker), 1);
    EXPECT_FALSE(CPU_ISSET(cpu, &worker));
    ++moves;
  }
  EXPECT_GE(moves, 2);
  sched_setaffinity(0, sizeof(before), &before);
}

TEST(ThreadTeam, SignalsOfTheProcessDoNotInterruptWorkers) {
  ThreadTeam team(threads(2));
  sigset_t blocked;
  sigemptyset(&blocked);
  team.run([&](int thread, int) {
    if (thread == 1) pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  });
  EXPECT_TRUE(sigismember(&blocked, SIGINT));
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  EXPECT_FALSE(sigismember(&blocked, SIGINT));
}

#if defined(__SANITIZE_THREAD__)
constexpr bool kCanForkThreads = false;  // the sanitizer ends a child that starts threads
#else
constexpr bool kCanForkThreads = true;
#endif

// Status of a child that runs `body` and must end by itself.
template <class Body>
int fork_and_run(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(body());
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

TEST(ThreadTeam, AForkedChildStartsWorkersOfItsOwn) {
  if (!kCanForkThreads) GTEST_SKIP();
  ThreadTeam team(threads(3)), idle(threads(2));
  team.run([](int, int) {});
  const int status = fork_and_run([&] {
    std::atomic<int> runs{0};
    for (int round = 0; round < 100; ++round) {
      team.run([&](int, int) {
        team.barrier();
        ++runs;
      });
    }
    idle.run([&](int, int) { ++runs; });
    return runs == 302 ? 0 : 1;
  });
  EXPECT_EQ(status, 0);
  std::atomic<int> runs{0};
  team.run([&](int, int) { ++runs; });
  EXPECT_EQ(runs, 3);
}

TEST(ThreadTeam, AChildForkedDuringARunOfAnotherThreadHasAWorkingTeam) {
  if (!kCanForkThreads) GTEST_SKIP();
  ThreadTeam team(threads(2));
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) team.run([&](int, int) { team.barrier(); });
  });
  for (int i = 0; i < 5; ++i) {
    const int status = fork_and_run([&] {
      std::atomic<int> runs{0};
      team.run([&](int, int) { ++runs; });
      return runs == 2 ? 0 : 1;
    });
    EXPECT_EQ(status, 0);
  }
  stop = true;
  busy.join();
}

TEST(ThreadTeam, AChildMayEndATeamThatItNeverUsed) {
  auto* team = new ThreadTeam(threads(2));
  team->run([](int, int) {});
  const int status = fork_and_run([&] {
    delete team;
    return 0;
  });
  EXPECT_EQ(status, 0);
  delete team;
}

}  // namespace
}  // namespace llmopt
