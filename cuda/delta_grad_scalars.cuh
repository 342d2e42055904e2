// Gradients of gate and beta of one chunk in delta_grad_tokens, from the sums of its warps.
#pragma once
#include "delta_grad_token_space.cuh"

constexpr float kLeastBeta = 8.6736174e-19f;  // 2^-60

// Of beta, a token a thread.
template <bool kDirect>
__device__ __forceinline__ void put_betas(const CallArgs& a, const GradArgs& g,
                                          const SlotChunk& chunk, long long h, const Decay& decay,
                                          const TokenSums& sums) {
  const int j = threadIdx.x;
  if (j >= chunk.tokens) return;
  const float last = nan_if_infinite(sums.last[0][j] + sums.last[1][j]);
  float d = times<true>(decay.to_end[j], last);
#pragma unroll 1
  for (int w = j / kBlock; w < kBlocks; w++) d += sums.columns[w][j] + sums.columns[kBlocks + w][j];
  // of de_j = beta_j w_j the sum is made already, with less to cancel
  if (fabsf(sums.beta[j]) > kLeastBeta) d = sums.along[j] / sums.beta[j];
  const long long at = (chunk.b * a.T + chunk.first + j) * a.H + h;
  if (kDirect)
    put_scalar<bfloat16_t>(g.dbeta, at, d, a.beta_kind);
  else
    static_cast<float*>(g.partial_scalars)[2 * at + 1] = d;
}

// Of the gradients of the gates of tokens 2 lane and 2 lane + 1, what G has of earlier writes; by
// one warp.
__device__ __forceinline__ void put_written(TokenSums& sums, const Decay& decay, int lane) {
  float writes[2], gate[2];
  const int t0 = 2 * lane;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    writes[i] = sums.beta[t0 + i] * (sums.last[0][t0 + i] + sums.last[1][t0 + i]);
    gate[i] = decay.gate[t0 + i];
  }
  // earlier(t + 1) = gate_t earlier(t) + writes_t
  float tail = bounded(writes[1] + times<true>(gate[1], writes[0]));
  float factor = times<true>(gate[0], gate[1]);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, tail, step);
    const float more = __shfl_up_sync(0xffffffffu, factor, step);
    if (lane >= step)
      tail = bounded(tail + times<true>(factor, other)), factor = times<true>(factor, more);
  }
  float before = __shfl_up_sync(0xffffffffu, tail, 1);
  if (lane == 0) before = 0;
  const float after = bounded(writes[0] + times<true>(gate[0], before));
  sums.written[t0] = times<true>(decay.to_end[t0], before);
  sums.written[t0 + 1] = times<true>(decay.to_end[t0 + 1], after);
}

// Gradients of the gates of tokens 2 lane and 2 lane + 1, by one warp: the pairs' part, the reads
// of S (and G of it), and G's of what was written.
template <bool kDirect>
__device__ __forceinline__ void put_gates(const CallArgs& a, const GradArgs& g,
                                          const SlotChunk& chunk, long long h, const Decay& decay,
                                          const TokenSums& sums, int lane) {
  float reads[2], gate[2];
  const int t0 = 2 * lane;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    reads[i] = sums.edge[0][t0 + i] + sums.edge[1][t0 + i];
    gate[i] = decay.gate[t0 + i];
  }
  // later(t) = reads_t + gate_{t+1} later(t + 1), which ends with <S, G>
  const float next = lane < 31 ? decay.gate[t0 + 2] : 1.f;
  float head = bounded(reads[0] + times<true>(gate[1], reads[1])),
        factor = times<true>(gate[1], next);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_down_sync(0xffffffffu, head, step);
    const float more = __shfl_down_sync(0xffffffffu, factor, step);
    if (lane + step < 32)
      head = bounded(head + times<true>(factor, other)), factor = times<true>(factor, more);
  }
  float all = 0;
  for (int w = 0; w < 2 * kBlocks; w++) all += sums.corner[w];
  head = bounded(head + times<true>(factor, all));
  const float after = __shfl_down_sync(0xffffffffu, head, 1);
  const float later[2] = {head, bounded(reads[1] + times<true>(next, lane < 31 ? after : all))};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = t0 + i;
    if (t >= chunk.tokens) continue;
    const float start = t ? decay.from_start[t - 1] : 1.f;
    float d = times<true>(start, later[i]) + sums.written[t];
#pragma unroll 1
    for (int w = t / kBlock; w < kBlocks; w++)
      d += sums.columns[w][t] + sums.columns[kBlocks + w][t];
    const long long at = (chunk.b * a.T + chunk.first + t) * a.H + h;
    if (kDirect) {
      if (a.gate_kind == kLogOfInputs || a.gate_kind == kLogOfFloat) d = exact_product(gate[i], d);
      put_scalar<bfloat16_t>(g.dgate, at, d, a.gate_kind);
    } else {
      static_cast<float*>(g.partial_scalars)[2 * at] = d;
    }
  }
}
