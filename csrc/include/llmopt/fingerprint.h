// Telling contents of memory apart without keeping a copy of them.
#pragma once

#include <cstdint>

namespace llmopt {

// 64 bits that are the same for the same bytes, wherever they lie and with any number of threads. Bytes that differ in
// one word always differ here, others up to a chance of 2^-64; nobody is assumed to search for two that agree.
uint64_t fingerprint(const void* data, int64_t num_bytes, int num_threads);

}  // namespace llmopt
