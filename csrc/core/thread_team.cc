// Threads that meet at a barrier hundreds of times per step, and are gone from the CPUs when there is no step.
//
//   run()       the caller writes the body and a new generation to one cache line; the workers watch that line
//   barrier()   dissemination: in round k thread i tells thread i + 2^k, and waits for thread i - 2^k. Each thread
//               watches a cache line of its own, so with two threads one line moves each way, at the same time
//   idle        a worker spins for spin_us, then sleeps on a condition variable
//
// Whoever waits long gives way: to threads on the same CPU after some microseconds, to everybody after milliseconds.
#include "llmopt/thread_team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace llmopt {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// Two cache lines: the hardware fetches them in pairs.
constexpr size_t kLinePair = 128;
// Waiting this long is normal; the clock is not even looked at. One pause takes 10 to 150 cycles.
constexpr int kFirstPauses = 200;
constexpr int kPausesPerLook = 50;
// Then somebody else probably needs the CPU that this thread spins on.
constexpr microseconds kYieldAfter{50};
// Nobody computes between two barriers for so long; a thread that is still waiting costs others less asleep.
constexpr microseconds kSleepAfter{20000};
constexpr microseconds kSleep{50};

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

// Few at a time, so that the end of the wait is soon noticed.
inline void fetch_lines(std::span<const std::byte>& ahead) {
  constexpr size_t kLine = 64, kLines = 4;
  const size_t bytes = std::min(kLines * kLine, ahead.size());
  for (size_t at = 0; at < bytes; at += kLine) __builtin_prefetch(ahead.data() + at, 0, 2);
  ahead = ahead.subspan(bytes);
}

// Wait until done() is true; false when it is not by `limit`, a time after the first clean spins.
// crowded: more threads than CPUs, so whoever is waited for may not run before this thread gives way.
template <class Done>
bool wait_for(bool crowded, std::optional<microseconds> limit, Done done) {
  for (int i = 0; i < (crowded ? 4 : kFirstPauses); ++i) {
    if (done()) return true;
    pause();
  }
  const Clock::time_point start = Clock::now();
  for (;;) {
    for (int i = 0; i < (crowded ? 1 : kPausesPerLook); ++i) {
      if (done()) return true;
      pause();
    }
    const auto waited = Clock::now() - start;
    if (limit && waited >= *limit) return false;
    if (waited >= kSleepAfter) {
      std::this_thread::sleep_for(kSleep);
    } else if (crowded || waited >= kYieldAfter) {
      sched_yield();
    }
  }
}

// CPUs that the calling thread may use; empty where the system does not tell.
std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
#endif
  return cpus;
}

int current_cpu() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

bool set_cpus(std::thread& thread, const std::vector<int>& cpus) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (int cpu : cpus) {
    if (cpu >= 0 && cpu < CPU_SETSIZE) CPU_SET(cpu, &set);
  }
  return pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set) == 0;
#else
  (void)thread, (void)cpus;
  return false;
#endif
}

// Signals are for the threads of the host program, which expect them.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// The workers of one process, and what all threads share. A forked child has none of the threads, and locks in the
// state of the moment; it gets a new object and leaves this one as it is.
class Crew {
 public:
  explicit Crew(const ThreadTeamOptions& options)
      : options_(options),
        seats_(std::make_unique<Seat[]>(options.num_threads)),
        worker_cpus_(options.num_threads, -1) {
    while ((1 << num_rounds_) < options.num_threads) ++num_rounds_;
    flags_ = std::make_unique<Flag[]>(static_cast<size_t>(num_rounds_) * options.num_threads);
  }

  ~Crew() { stop(); }

  void run(TeamFunction body);
  void barrier(int thread, std::span<const std::byte>& ahead);
  int size() const { return options_.num_threads; }

 private:
  struct alignas(kLinePair) Flag {
    std::atomic<uint64_t> epoch{0};
  };
  struct alignas(kLinePair) Seat {
    uint64_t epoch = 0;  // barriers passed; touched by its thread alone
  };
  struct alignas(kLinePair) Job {
    std::atomic<uint64_t> generation{0};
    std::optional<TeamFunction> body;  // none: the workers end
  };

  void start();
  void stop();
  void publish(std::optional<TeamFunction> body);
  void serve(int thread);
  void choose_cpus();

  const ThreadTeamOptions options_;
  int num_rounds_ = 0;
  bool crowded_ = false;           // more threads than CPUs
  std::unique_ptr<Flag[]> flags_;  // [num_rounds, num_threads]
  std::unique_ptr<Seat[]> seats_;  // [num_threads]
  Job job_;
  alignas(kLinePair) std::atomic<int> num_sleeping_{0};
  std::mutex sleep_mutex_;
  std::condition_variable wake_;

  std::mutex run_mutex_;  // held for a whole run(); guards what follows
  std::vector<std::thread> workers_;
  std::vector<int> cpus_;         // where threads may run; empty: not known, or not to be pinned
  std::vector<int> worker_cpus_;  // [num_threads] where each worker is pinned, -1: nowhere
};

// Which seat of which crew this thread has at the moment.
struct Place {
  Crew* crew = nullptr;
  int thread = 0;
  bool alone = false;  // in a run() inside of a run()
};
thread_local Place place;

class PlaceScope {
 public:
  explicit PlaceScope(Place now) : before_(std::exchange(place, now)) {}
  ~PlaceScope() { place = before_; }

 private:
  Place before_;
};

void call(const TeamFunction& body, int thread, int num_threads) noexcept { body(thread, num_threads); }

void Crew::run(TeamFunction body) {
  if (place.crew == this) {
    PlaceScope scope({this, 0, true});
    call(body, 0, 1);
    return;
  }
  std::lock_guard lock(run_mutex_);
  PlaceScope scope({this, 0, false});
  if (size() > 1) {
    if (workers_.empty()) start();
    choose_cpus();
    publish(body);
  }
  call(body, 0, size());
  std::span<const std::byte> nothing;
  barrier(0, nothing);
}

void Crew::barrier(int thread, std::span<const std::byte>& ahead) {
  const int num_threads = size();
  const uint64_t epoch = ++seats_[thread].epoch;
  for (int round = 0; round < num_rounds_; ++round) {
    Flag* flags = flags_.get() + static_cast<size_t>(round) * num_threads;
    flags[(thread + (1 << round)) % num_threads].epoch.store(epoch, std::memory_order_release);
    // The one that is waited for may be one barrier ahead already.
    const std::atomic<uint64_t>& mine = flags[thread].epoch;
    const auto is_done = [&] { return mine.load(std::memory_order_acquire) >= epoch; };
    while (!crowded_ && !ahead.empty() && !is_done()) fetch_lines(ahead);
    wait_for(crowded_, {}, is_done);
  }
}

void Crew::publish(std::optional<TeamFunction> body) {
  job_.body = body;
  // Sequentially consistent, like the worker's steps before it sleeps: either it sees the new generation or is seen
  // here.
  job_.generation.fetch_add(1, std::memory_order_seq_cst);
  if (num_sleeping_.load(std::memory_order_seq_cst) == 0) return;
  {
    std::lock_guard lock(sleep_mutex_);
  }
  wake_.notify_all();
}

void Crew::serve(int thread) {
  PlaceScope scope({this, thread, false});
  for (uint64_t seen = 0;; ++seen) {
    auto called = [&] { return job_.generation.load(std::memory_order_seq_cst) != seen; };
    if (!wait_for(crowded_, microseconds(options_.spin_us), called)) {
      std::unique_lock lock(sleep_mutex_);
      num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, called);
      num_sleeping_.fetch_sub(1, std::memory_order_relaxed);
    }
    if (!job_.body) return;
    call(*job_.body, thread, size());
    std::span<const std::byte> nothing;
    barrier(thread, nothing);
  }
}

void Crew::start() {
  cpus_ = options_.cpus.empty() ? allowed_cpus() : options_.cpus;
  const size_t num_cpus = cpus_.empty() ? std::thread::hardware_concurrency() : cpus_.size();
  // Given CPUs are the workers' own, so one may be missing for the caller.
  crowded_ = num_cpus != 0 && num_cpus + (options_.cpus.empty() ? 0 : 1) < static_cast<size_t>(size());
  SignalsBlocked blocked;
  job_.generation.store(0, std::memory_order_relaxed);
  try {
    for (int thread = 1; thread < size(); ++thread) {
      workers_.emplace_back([this, thread] { serve(thread); });
#if defined(__linux__)
      pthread_setname_np(workers_.back().native_handle(), "llmopt-team");
#endif
    }
  } catch (...) {
    stop();
    throw;
  }
  if (!options_.cpus.empty()) {
    for (std::thread& worker : workers_) set_cpus(worker, cpus_);
  }
  if (!options_.pin || crowded_) cpus_.clear();
}

void Crew::stop() {
  if (workers_.empty()) return;
  publish({});
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  std::ranges::fill(worker_cpus_, -1);
}

// A CPU for each worker, away from the one that the caller is on. The caller itself is not bound: its thread belongs to
// the host program, and the system may move it when another process comes.
void Crew::choose_cpus() {
  if (cpus_.empty()) return;
  const int caller = current_cpu();
  auto taken = [&](int cpu) { return std::ranges::find(worker_cpus_, cpu) != worker_cpus_.end(); };
  for (int thread = 1; thread < size(); ++thread) {
    int& pinned = worker_cpus_[thread];
    if (pinned >= 0 && pinned != caller) continue;
    auto free = std::ranges::find_if(cpus_, [&](int cpu) { return cpu != caller && !taken(cpu); });
    if (free == cpus_.end()) free = std::ranges::find_if(cpus_, [&](int cpu) { return !taken(cpu); });
    if (free == cpus_.end()) continue;
    if (!set_cpus(workers_[thread - 1], {*free})) {  // the allowed CPUs have changed meanwhile
      cpus_.clear();
      return;
    }
    pinned = *free;
  }
}

}  // namespace

class ThreadTeam::Impl {
 public:
  explicit Impl(ThreadTeamOptions options) : options_(std::move(options)), crew_(std::make_unique<Crew>(options_)) {
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(before_fork, after_fork, after_fork_in_child); });
    std::lock_guard lock(teams_mutex());
    teams().push_back(this);
  }

  ~Impl() {
    std::lock_guard lock(teams_mutex());
    std::erase(teams(), this);
  }

  const ThreadTeamOptions& options() const { return options_; }
  Crew& crew() { return *crew_; }

 private:
  // Never destroyed: teams may live as long as the process.
  static std::mutex& teams_mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::vector<Impl*>& teams() {
    static auto* teams = new std::vector<Impl*>;
    return *teams;
  }
  static void before_fork() { teams_mutex().lock(); }
  static void after_fork() { teams_mutex().unlock(); }
  static void after_fork_in_child() {
    for (Impl* team : teams()) {
      static_cast<void>(team->crew_.release());  // its threads are not there to be joined
      team->crew_ = std::make_unique<Crew>(team->options_);
    }
    place = {};
    teams_mutex().unlock();
  }

  const ThreadTeamOptions options_;
  std::unique_ptr<Crew> crew_;
};

ThreadTeam::ThreadTeam(ThreadTeamOptions options) {
  if (options.num_threads < 1 || options.spin_us < 0) {
    throw std::invalid_argument("num_threads is " + std::to_string(options.num_threads) + ", spin_us " +
                                std::to_string(options.spin_us) +
                                "; a team needs at least one thread and does not spin for a negative time.");
  }
  impl_ = std::make_unique<Impl>(std::move(options));
}

ThreadTeam::~ThreadTeam() = default;

int ThreadTeam::size() const { return impl_->options().num_threads; }

void ThreadTeam::run(TeamFunction body) { impl_->crew().run(body); }

void ThreadTeam::barrier() {
  std::span<const std::byte> nothing;
  barrier(nothing);
}

void ThreadTeam::barrier(std::span<const std::byte>& ahead) {
  if (place.crew == &impl_->crew() && !place.alone) place.crew->barrier(place.thread, ahead);
}

}  // namespace llmopt
