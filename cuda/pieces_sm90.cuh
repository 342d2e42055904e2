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

// How far a block is with its piece, and what others should know of it.
enum Stage { kLeft = 1, kTogether, kJudged, kLeftAgain, kTogetherAgain };
enum Mark { kCut = 8, kAgain = 16 };  // left out chunks; found that these matter

// Counts the chunks that a first pass takes in, from the gates, by one warp: eight chunks at a
// time, four lanes to each.
__device__ __forceinline__ int count_needed(const Walk& w, int lane) {
  constexpr int kLanes = 4, kBatch = 32 / kLanes, kOwn = kChunk / kLanes;
  const CallArgs& a = w.a;
  if (a.gate_kind == kAbsent) return w.chunks;
  const bool wide = a.gate_kind == kAsFloat || a.gate_kind == kLogOfFloat;
  const bool logs = a.gate_kind == kLogOfInputs || a.gate_kind == kLogOfFloat;
  const int bytes = wide ? 4 : 2;
  const long long first = w.b * a.gate_stride[0] + w.h * a.gate_stride[2];
  const long long step = kLanes * a.gate_stride[1] * bytes;
  float sum = 0;
#pragma unroll 1
  for (int c0 = 0; c0 < min(kMostLookBack, w.chunks); c0 += kBatch) {
    const int c = c0 + lane / kLanes, t = w.token(c, true) + lane % kLanes;
    const int left = c < w.chunks ? w.stop - t : 0;
    const char* from = static_cast<const char*>(a.gate) + (first + t * a.gate_stride[1]) * bytes;
    float gates[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; i++, from += step) {
      gates[i] = logs ? 0.f : 1.f;
      if (i * kLanes < left)
        gates[i] = wide ? *reinterpret_cast<const float*>(from)
                        : widen<float>(*reinterpret_cast<const bfloat16_t*>(from));
    }
    if (logs)
#pragma unroll
      for (int i = 0; i < kOwn; i++) gates[i] = __expf(gates[i]);
    float log = 0;  // of all gates from the end of the batch to this lane's chunk
#pragma unroll
    for (int i = 0; i < kOwn; i++) log += __log2f(fabsf(gates[i]));
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) log += __shfl_xor_sync(0xffffffffu, log, step);
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2) {
      const float later = __shfl_up_sync(0xffffffffu, log, step);
      if (lane >= step) log += later;
    }
    const unsigned forgotten = __ballot_sync(0xffffffffu, sum + log < kForgotten);
    if (forgotten) return min(max(c0 + __ffs(forgotten) / kLanes + 1, kSure), w.chunks);
    sum += __shfl_sync(0xffffffffu, log, 31);
  }
  return w.chunks;
}

// Of all pieces of a sequence but the last one, which leaves nothing.
struct Marks {
  bool any_cut, all_cut, any_again;
  __device__ __forceinline__ bool any(Mark mark) const {
    return mark == kCut ? any_cut : any_again;
  }
  __device__ __forceinline__ bool all(Mark) const { return all_cut; }
};

// Finds out what a first pass takes in, by one warp.
template <class S, int kStages>
__device__ __forceinline__ int begin_piece(Shared<S, kStages>& shared, const Walk& w, int lane) {
  const int needed = w.last_piece() ? w.chunks : count_needed(w, lane);
  if (lane > 0) return needed;
  shared.marks = 0;
  shared.needed = needed;
  shared.counted.arrive();
  return needed;
}

// Of one piece, kThreads together. Each block has a word of its own that tells how far it is:
// memory that need not have been cleared, as a word counts only with the number of this call. A
// graph, which repeats a call, clears them before.
template <int K, int V, int kStages, int kThreads>
struct Piece {
  static constexpr int kBarrier = 3;
  static constexpr int kSize = K * V / 4;  // of a state, in fours
  const CallArgs& a;
  const PieceArgs& cut;
  const Walk& w;
  const Places<K, V>& places;
  Shared<Shape<K, V>, kStages>& shared;
  int thread;

  // Writes the state of the first pass, for other blocks.
  __device__ __forceinline__ void leave(const float (&s)[V / 2], float decay, bool all) const {
    places.write(s, states() + w.piece * heads() * kSize);
    if (thread == 0) __stcg(decays() + w.piece * heads(), all ? decay : 0.f);
  }

  // Tells that this block has come so far, once all threads have written what others will read.
  __device__ __forceinline__ void arrive(Stage stage, bool marked, Mark mark) const {
    sync_threads<kThreads>(kBarrier);
    if (thread > 0) return;
    if (marked || (stage == kJudged && shared.again)) shared.marks |= mark;
    __threadfence();
    volatile unsigned long long* const own = progress() + w.piece;
    *own = cut.call << 8 | shared.marks | stage;
  }
  // Until all blocks of the head have come so far, by every warp.
  __device__ __forceinline__ Marks wait(Stage stage) const {
    const volatile unsigned long long* const all = progress();
    unsigned either = 0, both = ~0u;
    for (int p = thread % 32; p < cut.pieces; p += 32) {
      unsigned long long x = all[p];
      while (x >> 8 != cut.call || (x & 7) < stage) {
        __nanosleep(20);
        x = all[p];
      }
      if (p == cut.pieces - 1) continue;
      either |= static_cast<unsigned>(x);
      both &= static_cast<unsigned>(x);
    }
    __threadfence();
    return {__any_sync(0xffffffffu, either & kCut) != 0, __all_sync(0xffffffffu, both & kCut) != 0,
            __any_sync(0xffffffffu, either & kAgain) != 0};
  }

  // The state before the piece; `forgotten`: every piece has left out chunks, so that states before
  // those do not matter.
  __device__ __forceinline__ void read(float (&s)[V / 2], int attempt, bool forgotten) const {
    int from = w.piece - 1;
    if (!forgotten) {
      const Stage stage = attempt == 0 ? kTogether : kTogetherAgain;
      put_together();
      arrive(stage, false, kCut);
      wait(stage);
      from = w.piece;
    }
    if (from < 0)
      read_given(s);
    else
      places.read(s, states() + from * heads() * kSize);
  }

  // Tells whether what the first pass has left out is too much.
  __device__ __forceinline__ void doubt(bool doubtful) const {
    if (doubtful) shared.again = 1;
    arrive(kJudged, false, kAgain);
  }

 private:
  __device__ __forceinline__ int heads() const { return static_cast<int>(a.N * a.H); }
  __device__ __forceinline__ float4* states() const {
    return reinterpret_cast<float4*>(cut.states) + w.head() * kSize;
  }
  __device__ __forceinline__ float* decays() const { return cut.decays + w.head(); }
  __device__ __forceinline__ unsigned long long* progress() const {
    return cut.progress + w.head() * cut.pieces;
  }

  __device__ __forceinline__ void read_given(float (&s)[V / 2]) const {
    const float* const given = static_cast<const float*>(a.initial_state);
    places.read(s, cut,
                given ? given + w.head() * (static_cast<long long>(cut.K) * cut.V) : nullptr);
  }

  // States before each piece from those after each piece, S <- decay S + state, for this block's
  // share of their numbers, from kBatch pieces at a time.
  __device__ __forceinline__ void put_together() const {
    constexpr int kBatch = 4;
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
