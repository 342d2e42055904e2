// How the blocks of linear_sm90.cu that work on pieces of one sequence come by the states between
// them, by the warpgroups that keep states.
//
// Mostly gates have forgotten the start of a piece by its end. So the first pass, from end to
// start, stops once what is left of earlier tokens is less than kForgotten; the second pass, which
// sees them all, checks that it is kNegligible beside what was kept. Where it is not, all blocks of
// the head do both passes again, and take in all chunks.
#pragma once
#include "state_sm90.cuh"

constexpr float kForgotten = -24;               // logarithm to base 2 of a decay
constexpr float kNegligible = 1.f / (1 << 16);  // beside a state, for outputs of 8 bits
constexpr float kLeast = 1.1754944e-38f;        // normal number
constexpr int kMostLookBack = 32;               // chunks
constexpr int kCounters = 4;  // of a head: states there, put together at each attempt, judged
constexpr unsigned kMark = 1 << 16, kCount = kMark - 1;  // of counters: blocks, and marks by them

// Counts the chunks that a first pass takes in, from the gates, by one warp.
__device__ __forceinline__ int count_needed(const Walk& w, int lane) {
  constexpr int kBatch = 8;
  const CallArgs& a = w.a;
  const long long base = w.b * a.gate_stride[0] + w.h * a.gate_stride[2];
  float sum = 0;
#pragma unroll 1
  for (int c0 = 0; c0 < min(kMostLookBack, w.chunks); c0 += kBatch) {
    Scalar<bfloat16_t> gates[kBatch][2];
    const auto token = [&](int c, int i) { return w.token(c, true) + 2 * lane + i; };
    const auto real = [&](int t) { return t >= w.start && t < w.stop; };
#pragma unroll
    for (int c = 0; c < kBatch; c++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int t = token(c0 + c, i);
        if (real(t)) gates[c][i].load(a.gate, base + t * a.gate_stride[1], a.gate_kind);
      }
#pragma unroll
    for (int c = 0; c < kBatch; c++) {
      float log = 0;
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (real(token(c0 + c, i))) log += log2f(fabsf(gates[c][i].value<float>(a.gate_kind)));
#pragma unroll
      for (int step = 1; step < 32; step *= 2) log += __shfl_xor_sync(0xffffffffu, log, step);
      sum += log;
      if (sum < kForgotten) return min(max(c0 + c + 1, kSure), w.chunks);
    }
  }
  return w.chunks;
}

// Of one piece, kThreads together.
template <int K, int V, int kStages, int kThreads>
struct Piece {
  static constexpr int kBarrier = 3;
  static constexpr int kSize = K * V / 4;  // of a state, in fours
  const CallArgs& a;
  const PieceArgs& cut;
  const Walk& w;
  const Places<K, V>& places;
  int thread;

  // Leaves the state of the first pass, for other blocks.
  __device__ __forceinline__ void leave(const float (&s)[V / 2], float decay, bool all) const {
    places.write(s, states() + w.piece * heads() * kSize);
    if (thread == 0) __stcg(decays() + w.piece * heads(), all ? decay + 0.f : -0.f);
    arrive(0, !all);
  }
  // Until all pieces have done so; whether one has left out chunks, in this attempt or the first.
  __device__ __forceinline__ bool wait_for_all(int attempt) const {
    return wait(0, (attempt + 1) * (cut.pieces - 1));
  }

  // The state before the piece.
  __device__ __forceinline__ void read(float (&s)[V / 2], int attempt) const {
    int from = w.piece - 1;
    if (!all_cut_short()) {
      put_together();
      arrive(1 + attempt, false);
      wait(1 + attempt, cut.pieces);
      from = w.piece;
    }
    if (from < 0)
      read_given(s);
    else
      places.read(s, states() + from * heads() * kSize);
  }

  // Whether what the first pass has left out is too much, by any block of the head.
  __device__ __forceinline__ bool judge(bool doubtful, int& again) const {
    if (doubtful) again = 1;
    sync_threads<kThreads>(kBarrier);
    arrive(3, again);
    return wait(3, cut.pieces);
  }

 private:
  __device__ __forceinline__ int heads() const { return static_cast<int>(a.N * a.H); }
  __device__ __forceinline__ float4* states() const {
    return reinterpret_cast<float4*>(cut.states) + w.head() * kSize;
  }
  __device__ __forceinline__ float* decays() const { return cut.decays + w.head(); }
  __device__ __forceinline__ unsigned* counter(int i) const {
    return cut.arrivals + kCounters * w.head() + i;
  }

  // Counts this block in, once all threads have written what others will read.
  __device__ __forceinline__ void arrive(int i, bool mark) const {
    sync_threads<kThreads>(kBarrier);
    if (thread > 0) return;
    __threadfence();
    atomicAdd(counter(i), mark ? 1 + kMark : 1);
  }
  // Until so many blocks have been counted in; whether one has left a mark.
  __device__ __forceinline__ bool wait(int i, unsigned blocks) const {
    const volatile unsigned* const count = counter(i);
    if (thread == 0) {
      while ((*count & kCount) < blocks) __nanosleep(20);
      __threadfence();
    }
    sync_threads<kThreads>(kBarrier);
    return *count >= kMark;
  }

  // Whether a piece has left out chunks, by its decay: a zero that no product of gates plus 0 is.
  static __device__ __forceinline__ bool cut_short(float decay) {
    return __float_as_uint(decay) == 1u << 31;
  }

  // Whether every piece has left out chunks, so that states before those do not matter.
  __device__ __forceinline__ bool all_cut_short() const {
    bool all = true;
    for (int p = thread % 32; p < cut.pieces - 1; p += 32)
      all &= cut_short(__ldcg(decays() + p * heads()));
    return __all_sync(0xffffffffu, all);
  }

  __device__ __forceinline__ void read_given(float (&s)[V / 2]) const {
    const float* const from = static_cast<const float*>(a.initial_state) +
                              w.head() * (static_cast<long long>(cut.K) * cut.V);
    const bool given = a.initial_state;
    places.each(s, cut, [=](float& x, int at, bool real) { x = given && real ? from[at] : 0.f; });
  }

  // States before each piece from those after each piece, S <- decay S + state, for this block's
  // share of their numbers, from kBatch pieces at a time.
  __device__ __forceinline__ void put_together() const {
    constexpr int kBatch = 8;
    const int pieces = cut.pieces, NH = heads();
    float4* const all = states();
#pragma unroll 1
    for (int e = w.piece * kThreads + thread; e < kSize; e += pieces * kThreads) {
      float4 s = given_four(e);
#pragma unroll 1
      for (int p0 = 0; p0 < pieces; p0 += kBatch) {
        float4 own[kBatch];
        float decay[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
          const int p = min(p0 + i, pieces - 2);
          decay[i] = __ldcg(decays() + p * NH);
          own[i] = __ldcg(all + p * NH * kSize + e);
        }
#pragma unroll
        for (int i = 0; i < kBatch; i++) {
          if (p0 + i < pieces) __stcg(all + (p0 + i) * NH * kSize + e, s);
          s = {s.x * decay[i] + own[i].x, s.y * decay[i] + own[i].y, s.z * decay[i] + own[i].z,
               s.w * decay[i] + own[i].w};
        }
      }
    }
  }

  // Four numbers of the initial state, those at place e of a piece's.
  __device__ __forceinline__ float4 given_four(int e) const {
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
};
