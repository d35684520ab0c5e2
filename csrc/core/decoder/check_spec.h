// Do the sizes of a spec fit together?
#pragma once

#include <vector>

#include "llmopt/decoder_spec.h"
#include "llmopt/layer_cache.h"

namespace llmopt::decoder {

// Throws std::invalid_argument that names the first part that does not fit.
void check_spec(const DecoderSpec& spec, const std::vector<LayerCache>& caches);

}  // namespace llmopt::decoder
