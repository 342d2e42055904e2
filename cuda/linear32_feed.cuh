// Roles of cuda/linear32.cu that feed the others: decays, and copies of q, k and v.
#pragma once
#include "linear32_shape.cuh"

// One lane's gates or betas, and their way through shared memory. A float16 number travels in the
// four bytes that it lies in, or in the first two of them: copies are no shorter.
template <class In>
struct Scalars32 {
  const char* next;  // the one to be fetched
  long long step;    // bytes to the one after it
  int kind;

  template <class T>
  __device__ __forceinline__ static Scalars32 of(const T* base, long long at, long long step,
                                                 int kind) {
    const long long size = is_half(kind) ? 2 : 4;
    return {reinterpret_cast<const char*>(base) + at * size, step * size, kind};
  }

  __device__ __forceinline__ void fetch(float* to) const {
    if (is_half(kind))
      cp_async<4>(to, next - upper(next), 2 + upper(next));
    else if (kind != kAbsent)
      cp_async<4>(to, next);
  }

  // What was fetched `steps` steps ago, where it is a number that no exponential is taken of.
  __device__ __forceinline__ float plain(const float* from, int steps) const {
    if (kind == kAbsent) return 1;
    if (!is_half(kind)) return *from;
    return half_bits_to_float(
        static_cast<unsigned short>(__float_as_uint(*from) >> upper(next - steps * step) * 8));
  }
  __device__ __forceinline__ double value(const float* from, int steps) const {
    const double x = plain(from, steps);
    return kind == kLogOfInputs || kind == kLogOfFloat ? exp(x) : x;
  }

 private:
  static __device__ __forceinline__ bool is_half(int kind) {
    return sizeof(In) == 2 && (kind == kAsInputs || kind == kLogOfInputs);
  }
  // 2 where a float16 number lies in the upper half of four bytes, otherwise 0.
  static __device__ __forceinline__ int upper(const char* at) {
    return static_cast<int>(reinterpret_cast<unsigned long long>(at)) & 2;
  }
};

// Decays by warp `warp` of those that make them: of every so many chunks, one token a lane. Each
// gate is a read of its own, far from the next one: they are fetched turns before their use.
template <class S>
__device__ __forceinline__ void make_decays(const CallArgs& a, Shared<S>& shared, int warp,
                                            int lane) {
  constexpr int kAhead = S::kGateTurns, kStep = S::kDecayWarps * kChunk;
  const Item& item = shared.item;
  const int tokens = item.tokens, chunks = item.chunks;
  const long long first = item.start + warp * kChunk + lane;
  using Scalars = Scalars32<typename S::In>;
  auto gates =
      Scalars::of(static_cast<const char*>(a.gate),
                  item.b * a.gate_stride[0] + first * a.gate_stride[1] + item.h * a.gate_stride[2],
                  kStep * a.gate_stride[1], a.gate_kind);
  auto betas =
      Scalars::of(static_cast<const char*>(a.beta),
                  item.b * a.beta_stride[0] + first * a.beta_stride[1] + item.h * a.beta_stride[2],
                  kStep * a.beta_stride[1], a.beta_kind);
  int left = tokens - warp * kChunk - lane;  // tokens from the one to be fetched on
  Turn<kAhead> place;
  const auto numbers = [&] { return shared.gates[warp][place.slot][0] + lane; };
  const auto fetch = [&] {
    if (left > 0) {
      gates.fetch(numbers());
      betas.fetch(numbers() + kChunk);
    }
    cp_async_commit();
    gates.next += gates.step;
    betas.next += betas.step;
    left -= kStep;
    place.next();
  };
#pragma unroll 1
  for (int i = 0; i < kAhead; i++) fetch();
  Turn<S::kStages> stage;
  stage.skip(warp);
#pragma unroll 1
  for (int c = warp; c < chunks; c += S::kDecayWarps, stage.skip(S::kDecayWarps)) {
    shared.free[stage.slot].wait(stage.parity ^ 1);
    cp_async_wait<kAhead - 1>();
    const bool real = left + kAhead * kStep > 0;
    const double g = real ? gates.value(numbers(), kAhead) : 1;
    const float b = real ? betas.plain(numbers() + kChunk, kAhead) : 0;
    shared.decays[stage.slot].fill(lane, g, b);
    shared.loaded[stage.slot].wait(stage.parity);  // who waits for decays waits for all
    if (S::kWide == kBoxes && (c + 1) * kChunk > tokens && item.stop < a.T) {
      // rows of the next sequence, which may be NaN, lie where nothing of this one does
      float* const keys = shared.stages[stage.slot] + S::kQuery;
#pragma unroll 1
      for (int box = 0; box < S::kKeyBoxes + S::kValueBoxes; box++)
#pragma unroll 1
        for (int row = tokens - c * kChunk; row < kChunk; row++)
          keys[box * kTokenBox<float> + row * 32 + lane] = 0;
    }
    arrive(shared.made[stage.slot], lane);
    fetch();
  }
}

// Rows of a chunk into shared memory by the copying warps: kCols numbers a row, of which cols are
// real.
template <class S, int kCols>
__device__ __forceinline__ void copy_rows(typename S::In* to, const typename S::In* from,
                                          long long stride, int rows, int cols, int thread) {
  using In = typename S::In;
  constexpr int kAtOnce = S::kWide == kSingle ? 1 : S::kVector;
  constexpr int kVectors = kCols / kAtOnce, kThreads = 32 * S::kCopyWarps;
  constexpr int kBytes = kAtOnce * static_cast<int>(sizeof(In));
  static_assert(kCols % kAtOnce == 0, "rows of whole vectors");
#pragma unroll 4
  for (int e = thread; e < kChunk * kVectors; e += kThreads) {
    const int row = e / kVectors, at = e % kVectors * kAtOnce;
    const bool real = row < rows && at < cols;
    In* const goal = to + at / kBoxCols<In> * kTokenBox<In> + boxed<In>(row, at % kBoxCols<In>);
    const In* const source = from + (real ? row * stride + at : 0);
    if constexpr (kBytes >= 4)
      cp_async<kBytes>(goal, source, real ? kBytes : 0);
    else
      *goal = real ? *source : In{};
  }
}

template <class S>
__device__ __forceinline__ void copy(const CallArgs& a, Shared<S>& shared, int thread) {
  using In = typename S::In;
  const Item& item = shared.item;
  const long long hq = item.hq;
  const int tokens = item.tokens, chunks = item.chunks, cols = item.cols;
  const In* q = static_cast<const In*>(a.q) + item.b * a.q_stride[0] + hq * a.q_stride[2] +
                item.start * a.q_stride[1];
  const In* k = static_cast<const In*>(a.k) + item.b * a.k_stride[0] + hq * a.k_stride[2] +
                item.start * a.k_stride[1];
  const In* v = static_cast<const In*>(a.v) + item.b * a.v_stride[0] + item.h * a.v_stride[2] +
                item.start * a.v_stride[1] + item.col0;
  constexpr int kPending = S::kStages < 4 ? S::kStages - 1 : 3;
  Turn<S::kStages> stage, landed;
#pragma unroll 1
  for (int c = 0; c < chunks + kPending; c++) {
    if (c < chunks) {
      const int slot = stage.slot, rows = min(tokens - c * kChunk, kChunk);
      shared.free[slot].wait(stage.parity ^ 1);
      if (S::kOutput)
        copy_rows<S, S::K>(shared.queries(slot), q, a.q_stride[1], rows, S::K, thread);
      copy_rows<S, S::K>(shared.keys(slot), k, a.k_stride[1], rows, S::K, thread);
      copy_rows<S, S::kRealCols>(shared.values(slot), v, a.v_stride[1], rows, cols, thread);
      q += kChunk * a.q_stride[1];
      k += kChunk * a.k_stride[1];
      v += kChunk * a.v_stride[1];
      stage.next();
    }
    cp_async_commit();
    if (c < kPending) continue;
    cp_async_wait<kPending>();
    arrive(shared.loaded[landed.slot], thread % 32);
    landed.next();
  }
}

// The same by the copy engine, for one thread.
template <class S>
__device__ __forceinline__ void load(const CallArgs& a, Shared<S>& shared, const TensorMap& q_map,
                                     const TensorMap& k_map, const TensorMap& v_map) {
#if defined(SIMT_HOST) || __CUDA_ARCH__ >= 900
  const Item& item = shared.item;
  const int b = static_cast<int>(item.b), h = static_cast<int>(item.h), chunks = item.chunks;
  const int hq = static_cast<int>(item.hq), start = static_cast<int>(item.start);
  constexpr int kCols = kBoxCols<typename S::In>;
  Turn<S::kStages> stage;
#pragma unroll 1
  for (int c = 0; c < chunks; c++, stage.next()) {
    Barrier& barrier = shared.loaded[stage.slot];
    float* to = shared.stages[stage.slot];
    const int t = start + c * kChunk;
    shared.free[stage.slot].wait(stage.parity ^ 1);
    barrier.arrive_and_expect(sizeof(float) * S::kStage);
    if (S::kOutput)
      for (int i = 0; i < S::kKeyBoxes; i++, to += kTokenBox<float>)
        load_tile(to, q_map, i * kCols, hq, t, b, barrier);
    for (int i = 0; i < S::kKeyBoxes; i++, to += kTokenBox<float>)
      load_tile(to, k_map, i * kCols, hq, t, b, barrier);
    for (int i = 0; i < S::kValueBoxes; i++, to += kTokenBox<float>)
      load_tile(to, v_map, item.col0 + i * kCols, h, t, b, barrier);
  }
#endif
}
