// Gradients of gate and beta of one chunk in delta_grad32_tokens, from the sums of its warps.
#pragma once
#include "delta_grad32_space.cuh"

constexpr int kSides = 4;      // warps that have the same tokens
constexpr int kPairWarps = 6;  // blocks on and below the diagonal, of reads by q and by k
constexpr int kTokenThreads = 32 * kSides * kBlocks;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ / 100 == 9 || __CUDA_ARCH__ / 100 == 10)
constexpr int kTokenBlocks = 4;  // for which there is shared memory
#else
constexpr int kTokenBlocks = 2;
#endif
constexpr float kLeastBeta = 8.6736174e-19f;  // 2^-60

struct TokenSums {
  ChunkWeights weights;
  long long first;  // token, of those of all batch entries
  int tokens, head;
  float for_beta[kPairWarps][kChunk], for_gate[kPairWarps][kChunk];  // by warp
  float edge[kSides][kChunk],
      last[kSides][kChunk];        // x_i S d_i and k_j G e_j, by parts of K
  float along[kChunk];             // e_j . de_j
  float corner[kSides * kBlocks];  // <S, G>, by warp
};

// Gradients of gate and beta of a token a lane, by one warp.
template <bool kDirect>
__device__ __forceinline__ void put_scalars(const CallArgs& a, const GradArgs& g,
                                            const TokenSums& sums, int lane) {
  const ChunkWeights& weights = sums.weights;
  const int t = lane;
  float last = 0, edge = 0, for_gate = 0, corner = 0;
#pragma unroll
  for (int side = 0; side < kSides; side++) {
    last += sums.last[side][t];
    edge += sums.edge[side][t];
  }
  float for_beta = weights.to_end[t] * last;
#pragma unroll
  for (int w = 0; w < kPairWarps; w++) {
    if ((w > 3) == t / kBlock) for_beta += sums.for_beta[w][t];
    for_gate += t > 0 ? sums.for_gate[w][t - 1] : 0.f;
  }
  // of de_j = beta_j w_j the sum is made already, with less to cancel
  if (fabsf(weights.beta[t]) > kLeastBeta) for_beta = sums.along[t] / weights.beta[t];
  for (int w = 0; w < kSides * kBlocks; w++) corner += sums.corner[w];
  // later(t) = x_t S d_t + gate_{t+1} later(t + 1), which ends with <S, G>
  float later = edge, factor = t < 31 ? weights.gate[t + 1] : 1.f;
  if (t == 31) later += corner;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_down_sync(0xffffffffu, later, step);
    const float more = __shfl_down_sync(0xffffffffu, factor, step);
    if (t + step < 32)
      later = bounded(later + bounded(factor * other)), factor = bounded(factor * more);
  }
  // earlier(t + 1) = gate_t earlier(t) + beta_t k_t G e_t
  float earlier = weights.beta[t] * last;
  factor = weights.gate[t];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_up_sync(0xffffffffu, earlier, step);
    const float more = __shfl_up_sync(0xffffffffu, factor, step);
    if (t >= step)
      earlier = bounded(earlier + bounded(factor * other)), factor = bounded(factor * more);
  }
  earlier = __shfl_up_sync(0xffffffffu, earlier, 1);
  for_gate += (t > 0 ? weights.from_start[t - 1] : 1.f) * later;
  if (t > 0) for_gate += weights.to_end[t] * earlier;
  if (t >= sums.tokens) return;
  const long long at = (sums.first + t) * a.H + sums.head;
  if (kDirect) {
    if (a.gate_kind == kLogOfInputs || a.gate_kind == kLogOfFloat)
      for_gate = exact_product(weights.gate[t], for_gate);
    put_scalar<float>(g.dgate, at, for_gate, a.gate_kind);
    put_scalar<float>(g.dbeta, at, for_beta, a.beta_kind);
  } else {
    static_cast<float*>(g.partial_scalars)[2 * at] = for_gate;
    static_cast<float*>(g.partial_scalars)[2 * at + 1] = for_beta;
  }
}
