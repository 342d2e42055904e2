// Chunks of a head on their way to the walks of delta_grad.cu, and what no walk reaches.
#pragma once
#include "delta_grad_space.cuh"
#include "meet.cuh"

constexpr int kCopiers = 2;  // warps

template <int K, int V, int kBlockCols, int kStages>
struct WalkShape : HeadShape<K, V> {
  using Head = HeadShape<K, V>;
  static constexpr int kColBlocks = (V + kBlockCols - 1) / kBlockCols;
  static constexpr int kParts = Head::kRowTiles > 1 ? 2 : 1;  // of the rows of a state
  static constexpr int kOwnTiles = (Head::kRowTiles + kParts - 1) / kParts;
  static constexpr int kColGroups = kBlockCols / 16, kWalkers = kParts * kColGroups;  // warps
  static constexpr int kThreads = 32 * (kWalkers + kCopiers);
  static constexpr int kValueRow = kBlockCols + kPad;
  static constexpr int kKeys = kChunk * Head::kKeyRow;
  static constexpr int kTables = 2 * kKeys + kChunk * kValueRow;  // where they begin, in a stage
  static constexpr int kStage = kTables + kBackBytes / 2;         // 16-bit numbers
  static constexpr int kSums = kParts > 1 ? kWalkers * kChunk / 8 * 32 : 0;  // float4
  static constexpr int kBytes = 2 * kStages * kStage + 16 * kSums;
};

// Half of the rows of a chunk, and half of its tables, on their way into shared memory by one warp:
// k, v and tables on the way forward; k, q, dy and tables on the way back.
template <class S, int K, int kBlockCols, int kStages, bool kWide>
struct ChunkCopier {
  unsigned short* stages;
  const unsigned short *k, *q, *values;  // of the first token; q and values may be null
  const Prepared* prepared;              // of the first chunk
  long long k_stride, q_stride, value_stride, tokens, prepared_stride;
  int chunks, cols, half, lane;
  bool back;

  // The chunk of turn i.
  __device__ __forceinline__ void fetch(int i) const {
    if (i < chunks) {
      const int c = back ? chunks - 1 - i : i;
      unsigned short* const stage = stages + i % kStages * S::kStage;
      const long long t = static_cast<long long>(c) * kChunk + half * kCopyRows;
      const int rows = static_cast<int>(min(tokens - t, static_cast<long long>(kCopyRows)));
      unsigned short* const keys = stage + half * kCopyRows * S::kKeyRow;
      copy_rows<K, S::kKeyRow, kWide>(keys, k + t * k_stride, k_stride, rows, K, lane);
      if (back)
        copy_rows<K, S::kKeyRow, kWide>(keys + S::kKeys, q + t * q_stride, q_stride, rows, K, lane);
      if (values)
        copy_rows<kBlockCols, S::kValueRow, kWide>(
            stage + 2 * S::kKeys + half * kCopyRows * S::kValueRow, values + t * value_stride,
            value_stride, rows, cols, lane);
      const Prepared& from = prepared[c * prepared_stride];
      const uint4* const tables = back ? reinterpret_cast<const uint4*>(&from.weights)
                                       : reinterpret_cast<const uint4*>(&from.transposed);
      const int vectors = (back ? kBackBytes : kForwardBytes) / 16;
      for (int e = 32 * half + lane; e < vectors; e += 32 * kCopiers)
        cp_async<16>(reinterpret_cast<uint4*>(stage + S::kTables) + e, tables + e);
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void run() const {
    for (int i = 0; i < kStages - 1; i++) fetch(i);
    for (int i = 0; i < chunks; i++) {
      cp_async_wait<kStages - 2>();
      __syncthreads();
      if (S::kParts > 1) meet_beside();
      fetch(i + kStages - 1);
    }
  }
};

// Zeros for the tokens after the last sequence, which belong to none.
template <int K>
__device__ __forceinline__ void clear_tail(const CallArgs& a, const GradArgs& g, long long h,
                                           long long stop, unsigned short* dv, int cols,
                                           bool direct) {
  for (long long e = threadIdx.x; e < (a.T - stop) * cols; e += blockDim.x)
    dv[(stop + e / cols) * a.y_stride[1] + e % cols] = 0;
  if (!direct) return;
  for (long long e = threadIdx.x; e < (a.T - stop) * K; e += blockDim.x) {
    const long long at = ((stop + e / K) * a.H + h) * K + e % K;
    static_cast<unsigned short*>(g.dq)[at] = static_cast<unsigned short*>(g.dk)[at] = 0;
  }
  for (long long t = stop + threadIdx.x; t < a.T; t += blockDim.x) {
    put_scalar<bfloat16_t>(g.dgate, t * a.H + h, 0.f, a.gate_kind);
    put_scalar<bfloat16_t>(g.dbeta, t * a.H + h, 0.f, a.beta_kind);
  }
}
