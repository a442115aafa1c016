// Waves of tokens: a rank works on a wave once all ranks have finished it.
#pragma once

#include "kernels/protocol/control.h"

namespace jax_ep::cuda {

// The division of tokens into waves: the first has `head` tokens, the others `tokens`. It is equal on all
// ranks of an op, so it depends only on the op's shape, and not on how a rank moves its rows.
struct Waves {
  int32_t head;
  int32_t tokens;
  int32_t count;

  JAX_EP_HD int First(const Shape& shape, int wave) const {
    if (wave == 0) return 0;
    const int64_t first = head + int64_t{tokens} * (wave - 1);
    return first < shape.num_tokens ? static_cast<int>(first) : shape.num_tokens;
  }
  JAX_EP_HD int Of(int token) const { return token < head ? 0 : 1 + (token - head) / tokens; }
};

// Plans waves of about `tokens`, with a first wave of `head`, or larger ones if there would be too many. All
// are multiples of `step`.
inline Waves PlanWaves(const Shape& shape, int head, int tokens, int step) {
  const int64_t least = (shape.num_tokens + kMaxWaves - 2) / (kMaxWaves - 1);
  const int64_t later = AlignUp(least > tokens ? least : tokens, step), first = AlignUp(head, step);
  const int64_t rest = shape.num_tokens > first ? shape.num_tokens - first : 0;
  return {static_cast<int32_t>(first), static_cast<int32_t>(later),
          static_cast<int32_t>(1 + (rest + later - 1) / later)};
}

// Consecutive tokens of one wave, which a block sends before it synchronizes.
struct Batch {
  int begin, end;
};

// The division of a rank's waves into batches. Each wave starts with a new batch, so that ranks with
// different batch sizes agree on the waves.
struct Batches {
  int32_t tokens;   // of a batch, at most
  int32_t in_head;  // batches of the first wave
  int32_t in_wave;  // batches of each other wave

  static Batches Of(const Waves& waves, int tokens) {
    return {tokens, (waves.head + tokens - 1) / tokens, (waves.tokens + tokens - 1) / tokens};
  }
  // Returns batch `number`, or an empty one after the last token if there are fewer.
  JAX_EP_HD Batch Find(const Shape& shape, const Waves& waves, int number) const {
    if (number < in_head) return Cut(number * tokens, waves.First(shape, 1), shape.num_tokens);
    const int wave = 1 + (number - in_head) / in_wave, i = (number - in_head) % in_wave;
    return Cut(waves.First(shape, wave) + i * tokens, waves.First(shape, wave + 1), shape.num_tokens);
  }
  JAX_EP_HD int CountIn(const Shape& shape, const Waves& waves, int wave) const {
    return (waves.First(shape, wave + 1) - waves.First(shape, wave) + tokens - 1) / tokens;
  }
  JAX_EP_HD int Count(const Shape& shape, const Waves& waves) const {
    const int last = waves.count - 1;
    return (last == 0 ? 0 : in_head + (last - 1) * in_wave) + CountIn(shape, waves, last);
  }

 private:
  JAX_EP_HD Batch Cut(int begin, int wave_end, int num_tokens) const {
    if (begin >= wave_end) return {num_tokens, num_tokens};
    return {begin, begin + tokens < wave_end ? begin + tokens : wave_end};
  }
};

}  // namespace jax_ep::cuda
