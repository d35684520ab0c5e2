// Work on several threads of a pool that the process already has.
//
// A second pool would fight for the cores with the OpenMP team of torch, whose threads spin for a while after each
// parallel region. So regions run in the OpenMP runtime found in the process at run time (libgomp as torch loads it, or
// another runtime with the same entry point); there is no link dependency. Without one, and in a forked child, which
// has none of its threads, a small pool of our own serves.
#pragma once

#include <cstdint>
#include <type_traits>

namespace llmopt {

// Non-owning reference to a callable `void(int thread, int num_threads)`.
class TeamFunction {
 public:
  template <class Callable>
    requires(!std::is_same_v<std::remove_cvref_t<Callable>, TeamFunction>)
  TeamFunction(Callable&& callable)  // NOLINT: implicit, like a function argument
      : object_(const_cast<void*>(static_cast<const void*>(&callable))),
        invoke_([](void* object, int thread, int num_threads) {
          (*static_cast<std::remove_reference_t<Callable>*>(object))(thread, num_threads);
        }) {}

  void operator()(int thread, int num_threads) const { invoke_(object_, thread, num_threads); }

 private:
  void* object_;
  void (*invoke_)(void*, int, int);
};

// Run `body(thread, num_threads)` once on each of up to `num_threads` threads, the caller among them, and wait.
// The team may be smaller than asked for: split work by the arguments, not by the request. Inside another parallel
// region the body runs on the caller alone. The body must not throw.
void parallel_team(int num_threads, TeamFunction body);

// Where teams come from: "openmp" or "own".
const char* parallel_backend();

// Path of the library that holds the OpenMP runtime in use, or "" when the backend is our own.
const char* parallel_library();

}  // namespace llmopt
