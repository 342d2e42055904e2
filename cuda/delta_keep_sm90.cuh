// The role of delta_sm90.cu that keeps a state and makes outputs.
#pragma once
#include "delta_columns_sm90.cuh"

// Counts a warpgroup in, once all of it has written what others will read.
__device__ __forceinline__ void arrive_all(unsigned* count, int barrier, bool first) {
  __threadfence();
  sync_threads<kGroup>(barrier);
  if (first) atomicAdd(count, 1u);
}
// Until a warpgroup of another block has been counted in.
__device__ __forceinline__ void wait_for(const unsigned* count, int barrier, bool first) {
  if (first)
    while (*static_cast<const volatile unsigned*>(count) == 0) __nanosleep(100);
  sync_threads<kGroup>(barrier);
  __threadfence();
}

// A warpgroup that keeps 64 columns of the state.
template <int K, int kStages, bool kPieces>
struct Keeper {
  using S = Shape<K>;
  Shared<S, kStages>& shared;
  const CallArgs& a;
  const DeltaPieceArgs& cut;
  int thread;
  StateColumns64<K> state;
  Turn<kStages> stage;
  Turn<kTables> table;
  Turn<kPreparers> preparer;

  __device__ __forceinline__ Keeper(Shared<S, kStages>& memory, const CallArgs& call,
                                    const DeltaPieceArgs& pieces)
      : shared(memory),
        a(call),
        cut(pieces),
        thread(threadIdx.x % kGroup),
        state(thread / 32, thread % 32) {}

  // The next chunk, with its outputs in place of v.
  __device__ __forceinline__ void step() {
    const unsigned short* const q = shared.stages[stage.slot];
    const TokenWeights& weights = shared.weights[stage.slot];
    const PreparedChunk& chunk = shared.tables[table.slot];
    float u[32], o[32];
    unsigned rounded[K / 16][4];
    shared.loaded[stage.slot].wait(stage.parity);
    shared.weighed[stage.slot].wait(stage.parity);
    state.read(u, o, rounded, q, q + S::kQuery);
    shared.prepared[table.slot].wait(table.parity);
    if (__builtin_expect(shared.strain[table.slot].any(), 0))
      finish<true>(u, o, rounded, q, weights, chunk);
    else
      finish<false>(u, o, rounded, q, weights, chunk);
    __syncwarp();
    if (state.lane == 0) {
      shared.free[stage.slot].arrive();
      shared.tables_free[table.slot].arrive();
    }
    stage.next();
    table.next();
    preparer.next();
  }

 private:
  template <bool kCareful>
  __device__ __forceinline__ void finish(float (&u)[32], float (&o)[32],
                                         unsigned (&rounded)[K / 16][4], const unsigned short* q,
                                         const TokenWeights& weights, const PreparedChunk& chunk) {
    const unsigned short* const k = q + S::kQuery;
    unsigned short* const v = const_cast<unsigned short*>(k) + S::kQuery;
    unsigned x[kBlocks][4], rest[kBlocks][4];
    wgmma_wait<kCareful ? 0 : 1>();
    settle(u);
    state.template find_errors<kCareful>(x, rest, u, v, weights);
    wgmma_wait<0>();
    settle(o);
    float w[32];
    wgmma_begin();
    state.template multiply_table<true>(w, x, chunk.inverse);
    if (kCareful) state.template multiply_table<false>(w, rest, chunk.inverse);
    wgmma_commit();
    state.weigh(o, weights.out);
    const float whole = weights.decay.whole;
#pragma unroll
    for (int i = 0; i < K / 2; i++) state.s[i] *= whole;
    wgmma_wait<0>();
    settle(w);
    const Rests& rests = shared.rests[preparer.slot];
    if (kCareful) state.multiply_rests(w, x, rests.inverse, state.lane);
#pragma unroll
    for (int j = 0; j < kBlocks; j++) pack_tokens(x[j], w + 8 * j);
    if (kCareful)
#pragma unroll
      for (int j = 0; j < kBlocks; j++) pack_rest(rest[j], w + 8 * j);
    settle(o);
    wgmma_begin();
    state.template multiply_table<false>(o, x, chunk.scores);
    if (kCareful) state.template multiply_table<false>(o, rest, chunk.scores);
    wgmma_commit();
    if (kCareful) {
      wgmma_wait<0>();
      settle(o);
      state.multiply_rests(o, x, rests.scores, state.lane);
    }
    unsigned kept[kBlocks][4];
    state.weigh(w, weights.decay.to_end);
#pragma unroll
    for (int j = 0; j < kBlocks; j++) pack_tokens(kept[j], w + 8 * j);
    if (kCareful)
#pragma unroll
      for (int j = 0; j < kBlocks; j++) pack_rest(rest[j], w + 8 * j);
    settle(state.s);
    wgmma_begin();
    state.add_keys(kept, k);
    if (kCareful) state.add_keys(rest, k);
    wgmma_commit();
    wgmma_wait<1>();
    settle(o);
    state.put_outputs(v, o);
    fence_shared();
    __syncwarp();
    if (state.lane == 0) shared.finished[stage.slot].arrive();
    wgmma_wait<0>();
    settle(state.s);
  }

 public:
  // The first state of an item; returns the chunks to come.
  __device__ __forceinline__ int begin(int index) {
    const Item w(a, cut, index);
    const int col0 = w.column_block * 64, warm = kPieces ? shared.warm_chunks : 0,
              lane = forget(state.lane);
    if (a.initial_state && warm * kChunk == w.start - w.begin) {
      const float* const from = static_cast<const float*>(a.initial_state) +
                                w.n * a.state_stride[0] + w.h * a.state_stride[1] +
                                col0 * a.state_stride[3];
      const int cols = cut.V - col0;
      state.each(lane, [&](float& x, int row, int col) {
        x = row < cut.K && col < cols ? from[row * a.state_stride[2] + col * a.state_stride[3]]
                                      : 0.f;
      });
    } else {
      state.each(lane, [](float& x, int, int) { x = 0; });
    }
    return w.chunks + warm;
  }
  __device__ __forceinline__ void end(int index) {
    const Item w(a, cut, forget(index));
    const int col0 = w.column_block * 64, cols = cut.V - col0;
    if (kPieces && w.piece < cut.pieces - 1) {
      hand_on(index);
      return;
    }
    if (a.state) {
      float* const to = static_cast<float*>(a.state) +
                        (w.n * a.H + w.h) * (static_cast<long long>(cut.K) * cut.V) + col0;
      state.each(forget(state.lane), [&](float& x, int row, int col) {
        if (row < cut.K && col < cols) to[row * cut.V + col] = x;
      });
    }
    if (a.cu_seqlens && w.n == a.N - 1) clear_rest(w);
  }
  // Outputs of tokens of no sequence, after the last one.
  __device__ __forceinline__ void clear_rest(const Item& w) const {
    const int col0 = w.column_block * 64, cols = min(64, cut.V - col0);
    unsigned short* const y = static_cast<unsigned short*>(a.y) + w.b * a.y_stride[0] +
                              w.h * a.y_stride[2] + w.end * a.y_stride[1] + col0;
    if (cols > 0)
#pragma unroll 1
      for (long long e = thread; e < (a.T - w.end) * cols; e += kGroup)
        y[e / cols * a.y_stride[1] + e % cols] = 0;
  }

  // What a piece leaves, for the one after it, and what the one before has left.
  __device__ __forceinline__ void hand_on(int index) {
    float4* const to = place(index);
#pragma unroll
    for (int i = 0; i < K / 8; i++)
      __stcg(to + i * kGroup,
             float4{state.s[4 * i], state.s[4 * i + 1], state.s[4 * i + 2], state.s[4 * i + 3]});
    arrive_all(cut.arrivals + index, 1, thread == 0);
  }
  __device__ __forceinline__ void take_over(int index) {
    const float4* const from = place(index);
    wait_for(cut.arrivals + index, 1, thread == 0);
#pragma unroll
    for (int i = 0; i < K / 8; i++) {
      const float4 x = __ldcg(from + i * kGroup);
      state.s[4 * i] = x.x, state.s[4 * i + 1] = x.y, state.s[4 * i + 2] = x.z,
                  state.s[4 * i + 3] = x.w;
    }
  }
  __device__ __forceinline__ float4* place(int index) const {
    return reinterpret_cast<float4*>(cut.states) + static_cast<long long>(index) * (16 * K) +
           forget(thread);
  }
};
