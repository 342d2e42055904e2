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
  Turn<kStages> stage, ahead;
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

  // Takes in the chunks of an item; backwards, returns the decay of all of them.
  template <bool kBackwards>
  __device__ __forceinline__ float pass(int chunks) {
    float whole = 1;                            // decay of the chunks so far
    float all = 1;                              // of the chunk at hand
    unsigned kt[kBlocks][4], next[kBlocks][4];  // its keys, weighed, and those of the one after
    if (chunks > 0) prepare<kBackwards>(kt, all, whole);
    for (int c = 0; c < chunks; c++, stage.next()) {
      if constexpr (!kBackwards) publish(all);
      const unsigned short* const v = shared.stages[stage.slot] + S::kQuery + S::kKeyTiles * kTile;
      settle(s);
      wgmma_begin();
#pragma unroll
      for (int j = 0; j < kBlocks; j++)
        wgmma<true>(s, kt[j], factor(v + j * kBlock * 64, 2 * kTile));
      wgmma_commit();
      if (c + 1 < chunks) prepare<kBackwards>(next, all, whole);
      wgmma_wait<0>();
      settle(s);
      __syncwarp();
      if (lane == 0) shared.free[stage.slot].arrive();
      if (kBackwards && twice && lane == 0) shared.free[stage.slot].arrive();
      const unsigned none = after(s[0], zero);
#pragma unroll
      for (int j = 0; j < kBlocks; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) kt[j][i] = next[j][i] | kt[j][i] & none;
    }
    return whole;
  }

 private:
  // Weighs the keys of the next chunk.
  template <bool kBackwards>
  __device__ __forceinline__ void prepare(unsigned (&kt)[kBlocks][4], float& all, float& whole) {
    const Decay& decay = shared.decays[table.slot];
    const unsigned short* const k = shared.stages[ahead.slot] + own;
    shared.decays_made[table.slot].wait(table.parity);
    shared.loaded[ahead.slot].wait(ahead.parity);
#pragma unroll
    for (int j = 0; j < kBlocks; j++) ldmatrix_x4<true>(kt[j], k + j * kBlock * 64);
    const bool wild = decay.wild || (kBackwards && !(fabsf(whole) <= kWildProduct));
    if (__builtin_expect(wild, 0))
      weigh_keys<true, kBackwards>(kt, decay, whole, lane);
    else
      weigh_keys<false, kBackwards>(kt, decay, whole, lane);
    all = decay.whole;
    if (kBackwards) whole = bounded(whole * all);
    __syncwarp();
    if (lane == 0) shared.decays_free[table.slot].arrive();
    if (kBackwards && twice && lane == 0) shared.decays_free[table.slot].arrive();
    table.next();
    ahead.next();
  }

  // Writes the state, rounded, for the outputs, and decays it.
  __device__ __forceinline__ void publish(float all) {
    unsigned short* const to = shared.states[state.slot];
    shared.state_free[state.slot].wait(state.parity ^ 1);
#pragma unroll
    for (int i = 0; i < V / 16; i++)
      stmatrix_x4(to + i / 4 * (K * 64) + swizzled(row0 + lane % 16, i % 4 * 2 + lane / 16),
                  pack_bfloat16(s[8 * i], s[8 * i + 1]), pack_bfloat16(s[8 * i + 2], s[8 * i + 3]),
                  pack_bfloat16(s[8 * i + 4], s[8 * i + 5]),
                  pack_bfloat16(s[8 * i + 6], s[8 * i + 7]));
    fence_shared();
    __syncwarp();
    if (lane == 0) shared.state_made[state.slot].arrive();
    state.next();
#pragma unroll
    for (int i = 0; i < V / 2; i++) s[i] *= all;
  }
};

// Four numbers of the initial state, those at place e of a piece's.
template <int K>
__device__ __forceinline__ float4 given_four(const CallArgs& a, const PieceArgs& cut, const Walk& w,
                                             int e) {
  float4 x = {0, 0, 0, 0};
  if (!a.initial_state) return x;
  const int row = e % (2 * K) / 32 * 16 + e % 32 / 4, col = e / (2 * K) * 8 + e % 4 * 2;
  const float* const at =
      static_cast<const float*>(a.initial_state) + w.head() * (cut.K * cut.V) + row * cut.V + col;
  const bool left = col < cut.V, right = col + 1 < cut.V, lower = row + 8 < cut.K;
  if (row < cut.K && left) x.x = at[0];
  if (row < cut.K && right) x.y = at[1];
  if (lower && left) x.z = at[8 * cut.V];
  if (lower && right) x.w = at[8 * cut.V + 1];
  return x;
}

// States before each piece of a head from those after each piece, S <- decay S + state, for this
// block's share of their numbers, from kBatch pieces at a time.
template <int K, int V, int kBatch, int kThreads>
__device__ __forceinline__ void join(const CallArgs& a, const PieceArgs& cut, const Walk& w,
                                     int thread) {
  constexpr int kSize = K * V / 4;  // in fours
  const int pieces = cut.pieces, NH = static_cast<int>(a.N * a.H);
  float4* const states = reinterpret_cast<float4*>(cut.states + w.head() * (K * V));
  const float* const decays = cut.decays + w.head();
#pragma unroll 1
  for (int e = w.piece * kThreads + thread; e < kSize; e += pieces * kThreads) {
    float4 s = given_four<K>(a, cut, w, e);
#pragma unroll 1
    for (int p0 = 0; p0 < pieces; p0 += kBatch) {
      float4 own[kBatch];
      float decay[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const int p = min(p0 + i, pieces - 2);
        decay[i] = __ldcg(decays + p * NH);
        own[i] = __ldcg(states + p * NH * kSize + e);
      }
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        if (p0 + i < pieces) __stcg(states + (p0 + i) * NH * kSize + e, s);
        s = {s.x * decay[i] + own[i].x, s.y * decay[i] + own[i].y, s.z * decay[i] + own[i].z,
             s.w * decay[i] + own[i].w};
      }
    }
  }
}

// Counts a block in, once all of the calling threads have written what others will read.
template <int kThreads>
__device__ __forceinline__ void arrive_all(unsigned* count, int barrier, bool first) {
  sync_threads<kThreads>(barrier);
  if (!first) return;
  __threadfence();
  atomicAdd(count, 1u);
}
// Until so many blocks have been counted in, for all of the calling threads.
template <int kThreads>
__device__ __forceinline__ void wait_all(const unsigned* count, unsigned blocks, int barrier,
                                         bool first) {
  if (first) {
    while (*static_cast<const volatile unsigned*>(count) < blocks) __nanosleep(20);
    __threadfence();
  }
  sync_threads<kThreads>(barrier);
}
