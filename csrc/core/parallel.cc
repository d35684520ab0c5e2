#include "llmopt/parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace llmopt {
namespace {

// The entry points of an OpenMP runtime. libgomp defines them; LLVM's and Intel's runtimes export the same names.
struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;
  int (*in_parallel)() = nullptr;
  const char* library = "";

  bool found() const { return parallel && thread_num && num_threads && in_parallel; }
};

OpenMp find_openmp() {
  OpenMp omp;
  auto find = [](const char* symbol) { return dlsym(RTLD_DEFAULT, symbol); };
  omp.parallel = reinterpret_cast<decltype(omp.parallel)>(find("GOMP_parallel"));
  omp.thread_num = reinterpret_cast<decltype(omp.thread_num)>(find("omp_get_thread_num"));
  omp.num_threads = reinterpret_cast<decltype(omp.num_threads)>(find("omp_get_num_threads"));
  omp.in_parallel = reinterpret_cast<decltype(omp.in_parallel)>(find("omp_in_parallel"));
  Dl_info info;
  if (omp.found() && dladdr(reinterpret_cast<void*>(omp.parallel), &info) && info.dli_fname)
    omp.library = info.dli_fname;
  return omp;
}

const OpenMp& openmp() {
  static const OpenMp omp = find_openmp();
  return omp;
}

// Threads that sleep between regions. One region at a time: a second caller waits for the first.
class ThreadPool {
 public:
  ~ThreadPool() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  void run(int num_threads, const TeamFunction& body) {
    std::lock_guard region(region_mutex_);
    {
      std::lock_guard lock(mutex_);
      while (static_cast<int>(workers_.size()) < num_threads - 1) {
        const int index = static_cast<int>(workers_.size()) + 1;
        workers_.emplace_back([this, index, seen = generation_] { serve(index, seen); });
      }
      body_ = &body;
      num_threads_ = num_threads;
      running_ = num_threads - 1;
      ++generation_;
    }
    wake_.notify_all();
    body(0, num_threads);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  void serve(int index, uint64_t seen) {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
      if (index >= num_threads_) continue;
      const TeamFunction body = *body_;
      const int num_threads = num_threads_;
      lock.unlock();
      body(index, num_threads);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex region_mutex_;  // held for a whole region
  std::mutex mutex_;         // guards everything below
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  const TeamFunction* body_ = nullptr;
  int num_threads_ = 0;
  int running_ = 0;  // workers that have not finished the region
  uint64_t generation_ = 0;
  bool stopping_ = false;
};

thread_local bool inside_own_region = false;

// A forked child has none of the threads: libgomp would wait for them for ever. Once this process has had a team, its
// children take a pool of our own, a new one.
bool has_lost_openmp = false;
std::unique_ptr<ThreadPool>& own_pool() {
  static auto pool = std::make_unique<ThreadPool>();
  return pool;
}

void after_fork_in_child() {
  has_lost_openmp = true;
  static_cast<void>(own_pool().release());  // its threads are not there to be joined
  own_pool() = std::make_unique<ThreadPool>();
  inside_own_region = false;
}

bool uses_openmp() { return openmp().found() && !has_lost_openmp; }

}  // namespace

void parallel_team(int num_threads, TeamFunction body) {
  const OpenMp& omp = openmp();
  if (num_threads <= 1 || inside_own_region || (omp.found() && omp.in_parallel())) {
    body(0, 1);
    return;
  }
  static std::once_flag once;
  std::call_once(once, [] {
    own_pool();
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
  });
  if (uses_openmp()) {
    omp.parallel(
        [](void* data) {
          const OpenMp& omp = openmp();
          (*static_cast<TeamFunction*>(data))(omp.thread_num(), omp.num_threads());
        },
        &body, static_cast<unsigned>(num_threads), 0);
    return;
  }
  own_pool()->run(num_threads, [&](int thread, int team) {
    inside_own_region = true;
    body(thread, team);
    inside_own_region = false;
  });
}

const char* parallel_backend() { return uses_openmp() ? "openmp" : "own"; }

const char* parallel_library() { return uses_openmp() ? openmp().library : ""; }

}  // namespace llmopt
