// Where the time of a step goes, seen from the calling thread.
#pragma once

#include <chrono>
#include <cstdint>

namespace llmopt::decoder {

// In the order of a step. kWait is all time at barriers: the barrier itself, and threads that had more to do.
enum class Phase : uint8_t {
  kPrepare,
  kEmbedding,
  kNorm,
  kQkv,
  kRope,
  kAttention,
  kOutput,
  kUp,
  kDown,
  kRouter,
  kExperts,
  kHead,
  kWait,
  kCount,
};

constexpr const char* name(Phase phase) {
  constexpr const char* names[] = {"prepare", "embedding", "norm",   "qkv",     "rope", "attention", "output",
                                   "up",      "down",      "router", "experts", "head", "wait"};
  return names[static_cast<int>(phase)];
}

// Used by one thread. While it is off, a mark is one test of a flag.
class PhaseClock {
 public:
  bool is_on() const { return is_on_; }
  void switch_on(bool on) {
    if (on) *this = {};
    is_on_ = on;
  }
  void start() {
    if (is_on_) last_ = Clock::now();
  }
  // The time since the last mark belongs to `phase`.
  void mark(Phase phase) {
    if (!is_on_) return;
    const auto now = Clock::now();
    seconds_[static_cast<int>(phase)] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }
  double seconds(Phase phase) const { return seconds_[static_cast<int>(phase)]; }

 private:
  using Clock = std::chrono::steady_clock;
  bool is_on_ = false;
  Clock::time_point last_;
  double seconds_[static_cast<int>(Phase::kCount)] = {};
};

}  // namespace llmopt::decoder
