// What the delta rule needs of a chunk of 16 tokens before its state is known, made by one warp.
// With A_ij = beta_j D_ij k_i . k_j for j < i and W = (I + A)^-1:
//
//   writes_t = -sum_j W_tj d_j k_j        errors_t = sum_j W_tj v_j        keys_t = to_end_t k_t
//
// W is never made: what it multiplies is substituted forward, two columns of k or v a lane.
#pragma once
#include "delta16_shape.cuh"

template <class S>
struct Preparer {
  float (&alike)[kChunk][kDiagonalRow];
  int lane;

  template <bool kWild>
  __device__ __forceinline__ void make(Slot<S>& to, const float* k, const float* v,
                                       const Decay& decay) const {
    compare<kWild>(k, decay);
    const bool of_keys = lane < kKeyLanes;
    const int pair = of_keys ? lane : min(lane - kKeyLanes, kValueLanes - 1);
    const float* const from = (of_keys ? k : v) + 2 * pair;
    float x[kChunk][2];
#pragma unroll
    for (int t = 0; t < kChunk; t++) {
      const float2 two = *reinterpret_cast<const float2*>(from + t * S::kRow);
      x[t][0] = two.x, x[t][1] = two.y;
    }
    if (of_keys) {
      put_keys<kWild>(to.keys, x, 2 * lane, decay);
#pragma unroll
      for (int t = 0; t < kChunk; t++)
#pragma unroll
        for (int i = 0; i < 2; i++) x[t][i] = times<kWild>(x[t][i], -decay.from_start[t]);
    }
    __syncwarp();  // alike is complete
    substitute<kWild>(x);
    if (of_keys) {
#pragma unroll
      for (int t = 0; t < kChunk; t++)
        *reinterpret_cast<float2*>(to.writes + t * S::kRow + 2 * lane) = {x[t][0], x[t][1]};
    } else if (lane < kKeyLanes + kValueLanes) {
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int group = 0; group < 4; group++)
          put_group(to.errors, 2 * pair + i, group, [&](int t) { return x[t][i]; });
    }
    if (lane == 0) {
      to.whole = decay.whole;
      to.whole_rest = decay.whole_rest;
      to.wild = kWild;
    }
  }

 private:
  static constexpr int kKeyLanes = S::kKeyTiles * 4, kValueLanes = S::kValueTiles * 4;

  // Rows of the left factor are those of the right one.
  template <bool kWild>
  __device__ __forceinline__ void compare(const float* k, const Decay& decay) const {
    Sum sum[2];
    sum[0].clear(), sum[1].clear();
#pragma unroll
    for (int tile = 0; tile < S::kKeyTiles; tile++) {
      Pair<S::kProducts> rows[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 x = pair_at<S::kRow>(k, lane / 4 + i * 8, tile, lane);
        rows[i].set_left(x.x, x.y);
      }
      add_products(sum, rows, rows);
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {  // elsewhere a product may be anything: it is not multiplied
        const int row = lane / 4 + i / 2 * 8, col = n * 8 + lane % 4 * 2 + i % 2;
        if (n <= i / 2)
          alike[col][row] = col < row ? times<kWild>(sum[n].template total<S::kProducts>(i),
                                                     decay.between[row][col])
                                      : 0.f;
      }
  }

  template <bool kWild>
  __device__ __forceinline__ void substitute(float (&x)[kChunk][2]) const {
#pragma unroll
    for (int j = 0; j < kChunk - 1; j++)
#pragma unroll
      for (int first = (j + 1) / 4 * 4; first < kChunk; first += 4) {
        const auto a = *reinterpret_cast<const Run<float, 4>*>(&alike[j][first]);
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (first + e > j)
#pragma unroll
            for (int i = 0; i < 2; i++) {
              float& to = x[first + e][i];
              to = kWild ? bounded(to - bounded(a.x[e] * x[j][i])) : to - a.x[e] * x[j][i];
            }
      }
  }

  template <bool kWild>
  static __device__ __forceinline__ void put_keys(float* to, const float (&x)[kChunk][2], int row,
                                                  const Decay& decay) {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int group = 0; group < 4; group++)
        put_group(to, row + i, group,
                  [&](int t) { return times<kWild>(x[t][i], decay.to_end[t]); });
  }

  template <class F>
  static __device__ __forceinline__ void put_group(float* to, int row, int group, F number) {
    *reinterpret_cast<float4*>(to + group_at(row, group)) = {
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
    if (__builtin_expect(decay.wild, 0))
      preparer.template make<true>(to, k, v, decay);
    else
      preparer.template make<false>(to, k, v, decay);
    arrive(shared.prepared[slot.slot], lane);
    if (lane == 0) shared.free[stage.slot].arrive();
    stage.skip(S::kTeams);
    slot.skip(S::kTeams);
  }
}
