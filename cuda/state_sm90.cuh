// The role of linear_sm90.cu that keeps states, and how the states of pieces are put together.
#pragma once
#include "feed_sm90.cuh"
#include "scores.cuh"

// One warpgroup's 64 rows of a state.
template <int K, int V, int kStages>
struct State {
  using S = Shape<K, V>;
  Shared<S, kStages>& shared;
  int row0, warp, lane;
  bool twice;  // also lets go for the output group, which has no part in the first pass
  int own;     // where this lane reads keys, transposed, in a stage
  unsigned zero;
  Turn<kStages> stage;
  Turn<S::kDecays> table;
  Turn<S::kStates> state;
  float s[V / 2];

  __device__ __forceinline__ State(Shared<S, kStages>& memory, int group, int w, int l, unsigned z)
      : shared(memory),
        row0(group * 64 + w * 16),
        warp(w),
        lane(l),
        twice(group == 0),
        own(S::kQuery + group * kTile + swizzled(l / 16 * 8 + l % 8, w * 2 + l / 8 % 2)),
        zero(z) {}

  // Takes in the chunks of an item; backwards, as many as are needed, which is known once kSure
  // have been taken in, and returns the decay of all of them.
  template <bool kBackwards>
  __device__ __forceinline__ float pass(int& chunks) {
    float whole = 1;                            // decay of the chunks so far
    float all = 1;                              // of the chunk at hand
    unsigned kt[kBlocks][4], next[kBlocks][4];  // its keys, weighed, and those of the one after
    if (chunks > 0) prepare<kBackwards>(kt, all, whole, stage);
    for (int c = 0; c < chunks; c++, stage.next()) {
      if constexpr (!kBackwards) publish(all);
      const unsigned short* const v = shared.stages[stage.slot] + S::kQuery + S::kKeyTiles * kTile;
      settle(s);
      wgmma_begin();
#pragma unroll
      for (int j = 0; j < kBlocks; j++)
        wgmma<true>(s, kt[j], factor(v + j * kBlock * 64, 2 * kTile));
      wgmma_commit();
      Turn<kStages> ahead = stage;
      ahead.next();
      if (kBackwards && c + 1 == kSure) {
        shared.counted.wait(0);
        chunks = max(chunks, shared.needed);
      }
      if (c + 1 < chunks) prepare<kBackwards>(next, all, whole, ahead);
      wgmma_wait<0>();
      settle(s);
      arrive(shared.free[stage.slot], lane);
      if (kBackwards && twice) arrive_together(shared.free[stage.slot], lane);
      const unsigned none = after(s[0], zero);
#pragma unroll
      for (int j = 0; j < kBlocks; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) kt[j][i] = next[j][i] | kt[j][i] & none;
    }
    return whole;
  }
  __device__ __forceinline__ void pass_forwards(int chunks) { pass<false>(chunks); }

  // Of what this thread holds: the largest number, if finite, and the sum of all, without signs.
  __device__ __forceinline__ float largest() const {
    float x = 0;
#pragma unroll
    for (int i = 0; i < V / 2; i++) x = fmaxf(x, fabsf(s[i]));
    return fminf(x, kLargest);
  }
  __device__ __forceinline__ float sum() const {
    float x = 0;
#pragma unroll
    for (int i = 0; i < V / 2; i++) x += fabsf(s[i]);
    return x;
  }

 private:
  // Weighs the keys of the next chunk.
  template <bool kBackwards>
  __device__ __forceinline__ void prepare(unsigned (&kt)[kBlocks][4], float& all, float& whole,
                                          Turn<kStages> ahead) {
    const Decay& decay = shared.decays[table.slot];
    const unsigned short* const k = shared.stages[ahead.slot] + own;
    shared.decays_made[table.slot].wait(table.parity);
    shared.loaded[ahead.slot].wait(ahead.parity);
#pragma unroll
    for (int j = 0; j < kBlocks; j++) ldmatrix_x4<true>(kt[j], k + j * kBlock * 64);
    const bool wild = decay.wild || (kBackwards && !(fabsf(whole) <= kWildProduct));
    weigh_keys<kBackwards>(kt, decay, whole, lane);
    if (__builtin_expect(wild, 0)) {
#pragma unroll
      for (int j = 0; j < kBlocks; j++) {
        unsigned raw[4];
        ldmatrix_x4<true>(raw, shared.stages[ahead.slot] + afresh(own) + j * kBlock * 64);
#pragma unroll
        for (int i = 0; i < 4; i++) kt[j][i] = nan_if_infinite_pair(bounded_pair(kt[j][i]), raw[i]);
      }
    }
    all = decay.whole;
    if (kBackwards) whole = bounded(whole * all);
    arrive(shared.decays_free[table.slot], lane);
    if (kBackwards && twice) arrive_together(shared.decays_free[table.slot], lane);
    table.next();
  }

  // Writes the state, rounded, for the outputs, and decays it.
  __device__ __forceinline__ void publish(float all) {
    unsigned short* const to = shared.states[state.slot];
    const int at = afresh(swizzled(row0 + lane % 16, lane / 16));
    shared.state_free[state.slot].wait(state.parity ^ 1);
#pragma unroll
    for (int i = 0; i < V / 16; i++)
      stmatrix_x4(to + i / 4 * (K * 64) + (at ^ i % 4 * 16), pack_bfloat16(s[8 * i], s[8 * i + 1]),
                  pack_bfloat16(s[8 * i + 2], s[8 * i + 3]),
                  pack_bfloat16(s[8 * i + 4], s[8 * i + 5]),
                  pack_bfloat16(s[8 * i + 6], s[8 * i + 7]));
    fence_shared();
    arrive(shared.state_made[state.slot], lane);
    state.next();
#pragma unroll
    for (int i = 0; i < V / 2; i++) s[i] *= all;
  }
};
