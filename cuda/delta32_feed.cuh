// Roles of cuda/delta32.cu that feed the others: decays, and copies of q, k and v.
#pragma once
#include "delta32_shape.cuh"

// Decays by one warp, one token a lane. Each gate is a read of its own, far from the next one: it
// is under way for the time of a chunk.
template <class S>
__device__ __forceinline__ void make_decays(const CallArgs& a, Shared<S>& shared, int lane) {
  const Item& item = shared.item;
  const int tokens = item.tokens, chunks = item.chunks;
  const long long at = item.start + lane;
  long long gate_at = item.b * a.gate_stride[0] + at * a.gate_stride[1] + item.h * a.gate_stride[2];
  long long beta_at = item.b * a.beta_stride[0] + at * a.beta_stride[1] + item.h * a.beta_stride[2];
  Scalar<typename S::In> gate, beta;
  const auto fetch = [&](int t) {
    if (t >= tokens) return;
    gate.load(a.gate, gate_at, a.gate_kind);
    beta.load(a.beta, beta_at, a.beta_kind);
    gate_at += kChunk * a.gate_stride[1];
    beta_at += kChunk * a.beta_stride[1];
  };
  fetch(lane);
  Turn<S::kStages> stage;
#pragma unroll 1
  for (int t = lane, c = 0; c < chunks; c++, t += kChunk, stage.skip(1)) {
    double g = 1;
    float b = 0;
    if (t < tokens) {
      g = gate.template value<double>(a.gate_kind);
      b = beta.template value<float>(a.beta_kind);
    }
    fetch(t + kChunk);
    shared.free[stage.slot].wait(stage.parity ^ 1);
    shared.decays[stage.slot].fill(lane, g, b, fabsf(1 - b));
    arrive(shared.made[stage.slot], lane);
  }
}

// Rows of a chunk into shared memory by the copying warps: kCols numbers a row, of which cols are
// real. Numbers of float16 are widened on the way, some vectors at a time.
template <class S, int kCols, int kRow>
__device__ __forceinline__ void copy_rows(float* to, const typename S::In* from, long long stride,
                                          int rows, int cols, int thread) {
  using In = typename S::In;
  constexpr int kVectors = kCols / S::kWide, kThreads = 32 * S::kCopyWarps;
  constexpr int kCount = kChunk * kVectors, kTogether = S::kWide > 1 ? 8 : 4;
  static_assert(kCols % S::kWide == 0, "rows of whole vectors");
  if constexpr (sizeof(In) == 4) {
#pragma unroll 2
    for (int e = thread; e < kCount; e += kThreads) {
      const int row = e / kVectors, at = e % kVectors * S::kWide;
      const bool real = row < rows && at < cols;
      cp_async<4 * S::kWide>(to + place<kRow>(row, at), from + (real ? row * stride + at : 0),
                             real ? 4 * S::kWide : 0);
    }
  } else {
#pragma unroll 1
    for (int first = thread; first < kCount; first += kThreads * kTogether) {
      Packed<In, S::kWide> held[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; i++) {
        const int e = first + i * kThreads, row = e / kVectors, at = e % kVectors * S::kWide;
        held[i].raw = {};
        if (row < rows && at < cols)  // no row is real past the chunk
          held[i].raw = *reinterpret_cast<const decltype(held[i].raw)*>(from + row * stride + at);
      }
#pragma unroll
      for (int i = 0; i < kTogether; i++) {
        const int e = first + i * kThreads, row = e / kVectors, at = e % kVectors * S::kWide;
        if (e >= kCount) continue;
        float x[S::kWide];
        held[i].read(x);
        if constexpr (S::kWide == 1) {
          to[place<kRow>(row, at)] = x[0];
        } else {
#pragma unroll
          for (int j = 0; j < S::kWide; j += 4)
            *reinterpret_cast<float4*>(to + place<kRow>(row, at + j)) = {x[j], x[j + 1], x[j + 2],
                                                                         x[j + 3]};
        }
      }
    }
  }
}

// Rows of a chunk to unit length, a lane each.
template <int K, int kRow>
__device__ __forceinline__ void normalise_rows(float* rows, int lane) {
  float4* const row = reinterpret_cast<float4*>(rows + lane * kRow);
  float sum[4] = {};
  int at = lane % 8;  // neighbouring rows begin at different banks
#pragma unroll 4
  for (int i = 0; i < kRow / 4; i++, at = at + 1 < kRow / 4 ? at + 1 : 0) {
    const float4 x = row[at];
    sum[0] += x.x * x.x, sum[1] += x.y * x.y, sum[2] += x.z * x.z, sum[3] += x.w * x.w;
  }
  const float factor = 1.f / sqrtf((sum[0] + sum[1]) + (sum[2] + sum[3]) + 1e-6f);
  // padding stays 0 where a row is not a number, as no copy writes there
  const auto scaled = [&](float x, int col) { return col < K ? x * factor : 0.f; };
#pragma unroll 4
  for (int i = 0; i < kRow / 4; i++, at = at + 1 < kRow / 4 ? at + 1 : 0) {
    const float4 x = row[at];
    const int col = place<kRow>(lane, 4 * at) - lane * kRow;
    row[at] = {scaled(x.x, col), scaled(x.y, col + 1), scaled(x.z, col + 2), scaled(x.w, col + 3)};
  }
}

// By the copying warps. Who normalises waits for a chunk while the next one is under way.
template <class S>
__device__ __forceinline__ void copy(const CallArgs& a, Shared<S>& shared, int thread) {
  using In = typename S::In;
  const Item& item = shared.item;
  const long long hq = item.h / a.group;
  const int tokens = item.tokens, chunks = item.chunks, cols = item.cols;
  const In* q = static_cast<const In*>(a.q) + item.b * a.q_stride[0] + hq * a.q_stride[2] +
                item.start * a.q_stride[1];
  const In* k = static_cast<const In*>(a.k) + item.b * a.k_stride[0] + hq * a.k_stride[2] +
                item.start * a.k_stride[1];
  const In* v = static_cast<const In*>(a.v) + item.b * a.v_stride[0] + item.h * a.v_stride[2] +
                item.start * a.v_stride[1] + item.col0;
  Turn<S::kStages> stage, landed;
#pragma unroll 1
  for (int c = 0; c < chunks + S::kNormalise; c++) {
    if (c < chunks) {
      const int slot = stage.slot, rows = min(tokens - c * kChunk, kChunk);
      shared.free[slot].wait(stage.parity ^ 1);
#pragma unroll 1
      for (int i = 0; i < 2; i++)
        copy_rows<S, S::K, S::kKeyRow>(i ? shared.keys(slot) : shared.queries(slot), i ? k : q,
                                       i ? a.k_stride[1] : a.q_stride[1], rows, S::K, thread);
      copy_rows<S, S::kRealCols, S::kValueRow>(shared.values(slot), v, a.v_stride[1], rows, cols,
                                               thread);
      if (!S::kNormalise && sizeof(In) == 4)
        shared.loaded[slot].arrive_after_copies();
      else if (!S::kNormalise)
        shared.loaded[slot].arrive();
      q += kChunk * a.q_stride[1];
      k += kChunk * a.k_stride[1];
      v += kChunk * a.v_stride[1];
      stage.skip(1);
    }
    if (!S::kNormalise) continue;
    cp_async_commit();
    if (c == 0) continue;
    cp_async_wait<1>();
    sync_threads<32 * S::kCopyWarps>(1 + S::kTeams);
    const int lane = thread % 32;
    if (thread < 32) normalise_rows<S::K, S::kKeyRow>(shared.queries(landed.slot), lane);
    if (thread / 32 == S::kCopyWarps - 1)
      normalise_rows<S::K, S::kKeyRow>(shared.keys(landed.slot), lane);
    shared.loaded[landed.slot].arrive();
    landed.skip(1);
  }
}
