#include "llmopt/machine_probe.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <span>
#include <stdexcept>
#include <utility>

#include "core/machine_probe/kernels.h"
#include "core/machine_probe/pinned_threads.h"
#include "llmopt/isa.h"

namespace llmopt {
namespace {

using machine_probe::kSumWords;
using machine_probe::Peak;
using machine_probe::SpinBarrier;
using Clock = std::chrono::steady_clock;

constexpr size_t kHugePage = 2u << 20;
constexpr int kMinPasses = 3;
constexpr double kShortestPass = 0.5e-3;  // seconds; below, the barriers around a pass would be seen

const machine_probe::Kernels& kernels() {
  switch (selected_isa()) {
#if defined(LLMOPT_X86)
    case Isa::kAvx2:
      return machine_probe::avx2_kernels();
    case Isa::kAvx512:
      return machine_probe::avx512_kernels();
    case Isa::kAvx512Bf16:
      return machine_probe::avx512_bf16_kernels();
    case Isa::kAmx:
      return machine_probe::amx_kernels();
#endif
    default:
      return machine_probe::portable_kernels();
  }
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Repeats a piece of work on all threads, from barrier to barrier, and returns the time of its fastest repetition.
// Thread 0 holds the clock and decides how often: within `seconds`, kMinPasses at least.
double fastest_pass(const std::vector<int>& cpus, double seconds, const std::function<void(int)>& work) {
  SpinBarrier barrier(static_cast<int>(cpus.size()));
  std::atomic<bool> goes_on{true};
  double best = 0;
  machine_probe::run_pinned(cpus, [&](int thread) {
    work(thread);  // warms up caches, pages and the clock of the CPU
    barrier.wait();
    const auto start = Clock::now();
    for (int pass = 1; goes_on.load(std::memory_order_relaxed); ++pass) {
      const auto pass_start = Clock::now();
      work(thread);
      barrier.wait();
      if (thread == 0) {
        const double took = seconds_since(pass_start);
        if (best == 0 || took < best) best = took;
        if (pass >= kMinPasses && seconds_since(start) + took > seconds) goes_on.store(false);
      }
      barrier.wait();
    }
  });
  return best;
}

// Words [begin, end) of one thread's part, whole rounds of the summing loop.
std::pair<size_t, size_t> part(size_t num_words, int thread, int num_threads) {
  const size_t rounds = num_words / kSumWords;
  return {rounds * thread / num_threads * kSumWords, rounds * (thread + 1) / num_threads * kSumWords};
}

uint64_t sum_of_range(uint64_t begin, uint64_t end) {  // begin + ... + (end - 1), modulo 2^64
  const uint64_t a = end - begin, b = begin + end - 1;
  return a % 2 == 0 ? a / 2 * b : a * (b / 2);  // if a is odd, b is even
}

std::vector<std::pair<const char*, Peak>> peaks() {
  const machine_probe::Kernels& table = kernels();
  std::vector<std::pair<const char*, Peak>> found{{"float32", table.float32},
                                                  {"bfloat16_dot", table.bfloat16_dot},
                                                  {"bfloat16_tile", table.bfloat16_tile},
                                                  {"int8_dot", table.int8_dot},
                                                  {"int8_tile", table.int8_tile}};
  std::erase_if(found, [](const auto& entry) { return !entry.second; });
  return found;
}

}  // namespace

class BandwidthProbe::Impl {
 public:
  Impl(size_t max_bytes, std::vector<int> cpus) : cpus_(std::move(cpus)) {
    if (max_bytes == 0 || cpus_.empty()) {
      throw std::invalid_argument("a bandwidth is measured over at least one byte, on at least one CPU.");
    }
    size_ = (max_bytes + kHugePage - 1) / kHugePage * kHugePage;
    mapped_ = size_ + kHugePage;  // room to begin at a huge page
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    mapping_ = memory;
    const auto address = reinterpret_cast<uintptr_t>(memory);
    words_ = reinterpret_cast<uint64_t*>((address + kHugePage - 1) / kHugePage * kHugePage);
#if defined(MADV_HUGEPAGE)
    madvise(words_, size_, MADV_HUGEPAGE);  // a wish: without it pages are small and the figures those of small pages
#endif
    machine_probe::run_pinned(cpus_, [&](int thread) {
      const auto [begin, end] = part(size_ / sizeof(uint64_t), thread, static_cast<int>(cpus_.size()));
      for (size_t i = begin; i < end; ++i) words_[i] = i;
    });
  }

  ~Impl() { munmap(mapping_, mapped_); }

  double measure(size_t bytes, int num_threads, double seconds) {
    if (bytes < kSumWords * sizeof(uint64_t) * num_threads || bytes > size_) {
      throw std::invalid_argument("a working set of " + std::to_string(bytes) +
                                  " bytes was asked for; the memory has " + std::to_string(size_) +
                                  ", and a thread reads at least 512.");
    }
    if (num_threads < 1 || num_threads > static_cast<int>(cpus_.size())) {
      throw std::invalid_argument(std::to_string(num_threads) + " threads were asked for; there are CPUs for 1 to " +
                                  std::to_string(cpus_.size()) + ".");
    }
    const size_t num_words = bytes / sizeof(uint64_t);
    const auto sum = kernels().sum;
    constexpr double kGuess = 20e9;  // bytes per second
    const int repeats = std::max(1, static_cast<int>(kShortestPass * kGuess / static_cast<double>(bytes)));
    std::atomic<bool> is_right{true};
    const std::vector<int> used(cpus_.begin(), cpus_.begin() + num_threads);
    const double took = fastest_pass(used, seconds, [&](int thread) {
      const auto [begin, end] = part(num_words, thread, num_threads);
      uint64_t total = 0;
      for (int repeat = 0; repeat < repeats; ++repeat) total += sum(words_ + begin, end - begin);
      if (total != static_cast<uint64_t>(repeats) * sum_of_range(begin, end)) is_right.store(false);
    });
    if (!is_right.load()) throw std::logic_error("the words read do not add up to the words written.");
    const size_t read = part(num_words, num_threads - 1, num_threads).second * sizeof(uint64_t);
    return static_cast<double>(read) * repeats / took;
  }

 private:
  const std::vector<int> cpus_;
  size_t size_ = 0, mapped_ = 0;
  void* mapping_ = nullptr;
  uint64_t* words_ = nullptr;  // [size_ / 8], word i holds i
};

BandwidthProbe::BandwidthProbe(size_t max_bytes, std::vector<int> cpus)
    : impl_(std::make_unique<Impl>(max_bytes, std::move(cpus))) {}

BandwidthProbe::~BandwidthProbe() = default;

double BandwidthProbe::measure(size_t bytes, int num_threads, double seconds) {
  return impl_->measure(bytes, num_threads, seconds);
}

std::vector<std::string> peak_kinds() {
  std::vector<std::string> names;
  for (const auto& [name, peak] : peaks()) names.emplace_back(name);
  return names;
}

double measure_peak(std::string_view kind, const std::vector<int>& cpus, double seconds) {
  if (cpus.empty()) throw std::invalid_argument("a peak is measured on at least one CPU.");
  for (const auto& [name, peak] : peaks()) {
    if (kind != name) continue;
    constexpr int64_t kIterations = 20000;  // below 2 ms with every instruction set
    std::atomic<float> sink{0};
    const double took = fastest_pass(cpus, seconds, [&, run = peak.run](int) { sink.store(run(kIterations)); });
    return peak.ops_per_iteration * kIterations * static_cast<double>(cpus.size()) / took;
  }
  std::string known;
  for (const std::string& name : peak_kinds()) known += (known.empty() ? "" : ", ") + name;
  throw std::invalid_argument("no peak of kind " + std::string(kind) + " with this instruction set; there are " +
                              known + ".");
}

}  // namespace llmopt
