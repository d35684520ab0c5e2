// BLAKE2b with digests of 256 bits and no key (RFC 7693).
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace llmopt {

using Digest = std::array<uint8_t, 32>;

Digest blake2b_256(std::span<const uint8_t> data);

}  // namespace llmopt
