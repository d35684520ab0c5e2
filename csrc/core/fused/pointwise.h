// Operations whose result at a place depends on one row: norm, gated activation, rotation.
#pragma once

#include <cmath>

#include "core/activations.h"
#include "core/fused/storage.h"
#include "llmopt/fused.h"

namespace llmopt::fused {
namespace {

template <class Element>
struct RmsNorm {
  static void run(const RmsNormArgs& args, int64_t begin, int64_t end) {
    const auto* weight = static_cast<const Element*>(args.weight);
    const Vec one = splat(args.adds_one ? 1.0f : 0.0f);
    for (int64_t row = begin; row < end; ++row) {
      const Element* x = static_cast<const Element*>(args.x) + row * args.row_stride;
      Element* out = static_cast<Element*>(args.out) + row * args.size;
      Vec squares = {};
      for_each_vec(args.size, [&](int64_t i, auto num) {
        const Vec v = load_at(x + i, num);
        squares += v * v;
      });
      const Vec scale = splat(1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(args.size) + args.eps));
      for_each_vec(args.size, [&](int64_t i, auto num) {
        Vec v = load_at(x + i, num) * scale;
        if (args.rounds_first) v = rounded<Element>(v);
        if (weight) v *= load_at(weight + i, num) + one;
        store_at(out + i, v, num);
      });
    }
  }
};

template <class Element>
struct Gated {
  template <class Activate>
  static void run_with(const GatedArgs& args, int64_t begin, int64_t end, const Activate& activate) {
    for (int64_t row = begin; row < end; ++row) {
      const Element* gate = static_cast<const Element*>(args.gate) + row * args.gate_stride;
      const Element* up = static_cast<const Element*>(args.up) + row * args.up_stride;
      Element* out = static_cast<Element*>(args.out) + row * args.size;
      for_each_vec(args.size, [&](int64_t i, auto num) {
        store_at(out + i, rounded<Element>(activate(load_at(gate + i, num))) * load_at(up + i, num), num);
      });
    }
  }

  static void run(const GatedArgs& args, int64_t begin, int64_t end) {
    switch (args.activation) {
      case GateActivation::kSilu:
        return run_with(args, begin, end, [](Vec x) { return x * sigmoid(x); });
      case GateActivation::kGelu:
        return run_with(args, begin, end, [](Vec x) { return gelu(x); });
      case GateActivation::kGeluTanh:
        return run_with(args, begin, end, [](Vec x) { return gelu_tanh(x); });
    }
  }
};

template <class Element>
struct Rotate {
  // a * cos + b * sin, where b has its sign already
  static LLMOPT_INLINE Vec turn(Vec a, Vec cos, Vec b, Vec sin, bool rounds) {
    if (rounds) return rounded<Element>(a * cos) + rounded<Element>(b * sin);
    return a * cos + b * sin;
  }
  static LLMOPT_INLINE float at(const Element* from) { return load_vec(from, 1)[0]; }

  static void run_head(const RotateArgs& args, const Element* x, const Element* cos, const Element* sin, Element* out) {
    const int64_t dim = args.rotary_dim, half = dim / 2;
    const bool rounds = args.rounds_products;
    if (args.interleaved) {
      for (int64_t i = 0; i < dim; i += 2) {
        const Vec a = splat(at(x + i)), b = splat(at(x + i + 1));
        store_vec(out + i, turn(a, splat(at(cos + i)), -b, splat(at(sin + i)), rounds), 1);
        store_vec(out + i + 1, turn(b, splat(at(cos + i + 1)), a, splat(at(sin + i + 1)), rounds), 1);
      }
    } else {
      for_each_vec(half, [&](int64_t i, auto num) {
        const Vec a = load_at(x + i, num), b = load_at(x + half + i, num);
        store_at(out + i, turn(a, load_at(cos + i, num), -b, load_at(sin + i, num), rounds), num);
        store_at(out + half + i, turn(b, load_at(cos + half + i, num), a, load_at(sin + half + i, num), rounds), num);
      });
    }
    std::memcpy(out + dim, x + dim, (args.head_dim - dim) * sizeof(Element));
  }

  static void run(const RotateArgs& args, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t batch = row / args.num_tokens, token = row % args.num_tokens;
      const Element* x = static_cast<const Element*>(args.x) + batch * args.batch_stride + token * args.token_stride;
      const int64_t place = batch * args.cos_batch_stride + token * args.cos_token_stride;
      Element* out = static_cast<Element*>(args.out) + row * args.num_heads * args.head_dim;
      for (int64_t head = 0; head < args.num_heads; ++head) {
        run_head(args, x + head * args.head_stride, static_cast<const Element*>(args.cos) + place,
                 static_cast<const Element*>(args.sin) + place, out + head * args.head_dim);
      }
    }
  }
};

}  // namespace
}  // namespace llmopt::fused
