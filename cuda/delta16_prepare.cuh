// What the delta rule needs of a chunk of 16 tokens before its state is known, made by one warp.
// With A_ij = beta_j D_ij k_i . k_j for j < i and W = (I + A)^-1:
//
//   writes_t = -sum_j W_tj d_j k_j        errors_t = sum_j W_tj v_j        keys_t = to_end_t k_t
//   scores_tj = (q_t . k_j) D_tj, j <= t
//
// W is never made: what it multiplies is substituted forward, a column of k or v a lane. Code that
// is short, and run again for more columns, leaves other warps more of what fetches instructions.
#pragma once
#include "delta16_shape.cuh"

template <class S>
struct Preparer {
  float (&alike)[kChunk][kDiagonalRow];
  int lane;

  __device__ __forceinline__ void make(Slot<S>& to, const float* q, const float* k, const float* v,
                                       const Decay& decay) const {
    Sum<S::kProducts> of_keys[2], of_queries[2];
    compare(of_keys, of_queries, q, k);
    if (__builtin_expect(decay.wild, 0)) {
      put_products<true>(to, of_keys, of_queries, decay);
      make<true>(to, k, v, decay);
    } else {
      put_products<false>(to, of_keys, of_queries, decay);
      make<false>(to, k, v, decay);
    }
  }

 private:
  static constexpr int kKeys = S::kKeyTiles * 8, kColumns = kKeys + S::kValueTiles * 8;

  template <bool kWild>
  __device__ __forceinline__ void make(Slot<S>& to, const float* k, const float* v,
                                       const Decay& decay) const {
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < kColumns; i += 32)
      make_column<kWild>(to, i < kKeys ? k + i : v + (i - kKeys), decay, i);
  }

  template <bool kWild>
  __device__ __forceinline__ void make_column(Slot<S>& to, const float* from, const Decay& decay,
                                              int col) const {
    float x[kChunk];
#pragma unroll
    for (int t = 0; t < kChunk; t++) x[t] = given<kWild>(from[t * S::kRow]);
    if (col < kKeys) {
      put_column(to.keys, col, [&](int t) { return times<kWild>(x[t], decay.to_end[t]); });
#pragma unroll
      for (int t = 0; t < kChunk; t++) x[t] = times<kWild>(x[t], -decay.from_start[t]);
    }
    substitute<kWild>(x);
    if (col < kKeys) {
#pragma unroll
      for (int t = 0; t < kChunk; t++) to.writes[t * S::kRow + col] = x[t];
    } else {
      put_column(to.errors, col - kKeys, [&](int t) { return x[t]; });
    }
  }

  // Rows of k are both factors: what is rounded serves as the right one too.
  __device__ __forceinline__ void compare(Sum<S::kProducts> (&of_keys)[2],
                                          Sum<S::kProducts> (&of_queries)[2], const float* q,
                                          const float* k) const {
#pragma unroll 1
    for (int tile = 0; tile < S::kKeyTiles; tile++) {
      Pair<S::kProducts> keys[2], queries[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 x = pair_at<S::kRow>(k, lane / 4 + i * 8, tile, lane);
        const float2 y = pair_at<S::kRow>(q, lane / 4 + i * 8, tile, lane);
        keys[i].set_left(x.x, x.y);
        queries[i].set_left(y.x, y.y);
      }
      add_products(of_keys, keys, keys);
      add_products(of_queries, queries, keys);
    }
  }

  template <bool kWild>
  __device__ __forceinline__ void put_products(Slot<S>& to, const Sum<S::kProducts> (&of_keys)[2],
                                               const Sum<S::kProducts> (&of_queries)[2],
                                               const Decay& decay) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = lane / 4 + half * 8;
      float scores[4] = {};
#pragma unroll
      for (int n = 0; n <= half; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {  // above the diagonal a product may be anything, NaN too
          const int col = n * 8 + lane % 4 * 2 + i;
          const float weight = decay.between[row][col];
          alike[col][row] = col < row ? times<kWild>(of_keys[n].total(2 * half + i), weight) : 0.f;
          scores[2 * n + i] =
              col <= row ? times<kWild>(of_queries[n].total(2 * half + i), weight) : 0.f;
        }
      *reinterpret_cast<float4*>(to.scores + group_at(row, lane % 4)) = {scores[0], scores[1],
                                                                         scores[2], scores[3]};
    }
  }

  template <bool kWild>
  __device__ __forceinline__ void substitute(float (&x)[kChunk]) const {
#pragma unroll
    for (int j = 0; j < kChunk - 1; j++)
#pragma unroll
      for (int first = (j + 1) / 4 * 4; first < kChunk; first += 4) {
        const auto a = *reinterpret_cast<const Run<float, 4>*>(&alike[j][first]);
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (first + e > j) {
            float& to = x[first + e];
            to = kWild ? bounded(to - bounded(a.x[e] * x[j])) : to - a.x[e] * x[j];
          }
      }
  }

  template <class F>
  static __device__ __forceinline__ void put_column(float* to, int col, F number) {
#pragma unroll
    for (int group = 0; group < 4; group++)
      *reinterpret_cast<float4*>(to + group_at(col, group)) = {
          number(token_of(group, 0)), number(token_of(group, 1)), number(token_of(group, 2)),
          number(token_of(group, 3))};
  }
};

// Chunks by one warp each, kTeams chunks at a time.
template <class S>
__device__ __forceinline__ void prepare(Shared<S>& shared, int team, int lane) {
  const int chunks = shared.item.chunks;
  const Preparer<S> preparer{shared.alike[team], lane};
  Turn<S::kStages> stage;
  Turn<S::kSlots> slot;
  stage.skip(team);
  slot.skip(team);
#pragma unroll 1
  for (int c = team; c < chunks; c += S::kTeams) {
    shared.loaded[stage.slot].wait(stage.parity);
    shared.made[stage.slot].wait(stage.parity);
    shared.used[slot.slot].wait(slot.parity ^ 1);
    const Decay& decay = shared.decays[stage.slot];
    Slot<S>& to = shared.slots[slot.slot];
    const float *const k = shared.keys(stage.slot), *const v = shared.values(stage.slot);
    preparer.make(to, shared.queries(stage.slot), k, v, decay);
    arrive(shared.prepared[slot.slot], lane);
    stage.skip(S::kTeams);
    slot.skip(S::kTeams);
  }
}
