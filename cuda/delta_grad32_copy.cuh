// Chunks of a head on their way to the walks of delta_grad32.cu, and what no walk reaches.
#pragma once
#include "delta_grad32_space.cuh"

constexpr int kCopierBytes = 144;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ / 100 == 9
constexpr int kWalkBlocks = 2;  // for which there is room, with two stages
#else
constexpr int kWalkBlocks = 1;
#endif

template <int K, int V, int kBlockCols, int kStages>
struct WalkShape : HeadShape<K, V> {
  using Head = HeadShape<K, V>;
  static constexpr int kColBlocks = (V + kBlockCols - 1) / kBlockCols;
  static constexpr int kParts = Head::kRowTiles > 1 ? 2 : 1;  // of the rows of a state
  static constexpr int kOwnTiles = (Head::kRowTiles + kParts - 1) / kParts;
  static constexpr int kColGroups = kBlockCols / 16, kWalkers = kParts * kColGroups;  // warps
  static constexpr int kThreads = 32 * kWalkers;
  static constexpr int kValueRow = kBlockCols + kPad;
  static constexpr int kRowsOfK = kChunk * Head::kKeyRow, kPairs = kChunk * kPairRow;
  static constexpr int kValuesAt = 2 * kRowsOfK, kPairsAt = kValuesAt + kChunk * kValueRow;
  static constexpr int kStage = kPairsAt + 2 * kPairs;
  static constexpr int kWeightsAt = kStages * kStage;
  static constexpr int kWeights = static_cast<int>(sizeof(ChunkWeights)) / 4;
  static constexpr int kSums = kParts > 1 ? kWalkers * kChunk / 8 * 32 : 0;  // float4
  static constexpr int kSumsAt = kWeightsAt + (kStages + 1) * kWeights;
  static constexpr int kCopierAt = kSumsAt + 4 * kSums;  // floats
  static constexpr int kBytes = 4 * kCopierAt + kCopierBytes;
};

// The chunks of a head on their way into shared memory by all warps: k, v, the inverse and
// weights on the way forward; k, q, dy, the inverse, scores and weights on the way back. Weights
// come with the chunk before: they are known when rows are split in planes. It lies in shared
// memory: what it holds would take the registers of every thread.
template <class S, int K, int kBlockCols, int kStages, bool kWide>
struct ChunkCopier {
  const float *k, *q, *values;  // of the first token; values may be null
  const Prepared* prepared;     // of the first chunk
  long long k_stride, q_stride, value_stride, tokens, prepared_stride;
  int chunks, cols, back, first_thread;
  float* dv;        // of the first token
  long long entry;  // of the first chunk
  float* states;    // that are saved
  float scale;

  __device__ __forceinline__ int chunk(int i) const { return back ? chunks - 1 - i : i; }
  static __device__ __forceinline__ float* stage(float* shared, int i) {
    return shared + i % kStages * S::kStage;
  }
  static __device__ __forceinline__ float* weights(float* shared,
                                                   int i) {  // of the chunk of turn i
    return shared + S::kWeightsAt + i % (kStages + 1) * S::kWeights;
  }
  static __device__ __forceinline__ bool strained(float* shared, int i) {
    return reinterpret_cast<const ChunkWeights*>(weights(shared, i))->strained;
  }
  __device__ __forceinline__ void fetch_weights(float* shared, int i) const {
    const int thread = threadIdx.x - first_thread;
    const float* const from =
        reinterpret_cast<const float*>(&prepared[chunk(i) * prepared_stride].weights);
    for (int e = 4 * thread; e < S::kWeights; e += 4 * S::kThreads)
      cp_async<16>(weights(shared, i) + e, from + e);
  }

  // The chunk of turn i, and weights of the one that comes after it.
  __device__ __forceinline__ void fetch(float* shared, int i) const {
    const int thread = threadIdx.x - first_thread;  // known late: no register is held for it
    if (i < chunks) {
      const int c = chunk(i);
      float* const stage = this->stage(shared, i);
      const long long t = static_cast<long long>(c) * kChunk;
      const int rows = static_cast<int>(min(tokens - t, static_cast<long long>(kChunk)));
      copy_rows<kChunk, S::kKeys, S::kKeyRow, kWide, S::kThreads>(stage, k + t * k_stride, k_stride,
                                                                  0, rows, K, thread);
      if (back)
        copy_rows<kChunk, S::kKeys, S::kKeyRow, kWide, S::kThreads>(
            stage + S::kRowsOfK, q + t * q_stride, q_stride, 0, rows, K, thread);
      if (values)
        copy_rows<kChunk, kBlockCols, S::kValueRow, kWide, S::kThreads>(
            stage + S::kValuesAt, values + t * value_stride, value_stride, 0, rows, cols, thread);
      const Prepared& from = prepared[c * prepared_stride];
      float* const pairs = stage + S::kPairsAt;
      copy_pairs<S::kThreads>(pairs, from.inverse, thread);
      if (back) copy_pairs<S::kThreads>(pairs + S::kPairs, from.scores, thread);
      if (i + 1 < chunks) fetch_weights(shared, i + 1);
    }
    cp_async_commit();
  }

  // Rows of the chunk of turn i in planes; those of q with their share in the state's gradient. A
  // strained chunk's stay as they are.
  __device__ __forceinline__ void split(float* shared, int i) const {
    const int thread = threadIdx.x - first_thread;
    if (strained(shared, i)) return;
    float* const k = stage(shared, i);
    float* const q = k + S::kRowsOfK;
    float* const values = k + S::kValuesAt;
    constexpr bool kAlike = S::kKeyRow == S::kValueRow;
    const float* const from_start = weights(shared, i);
    const float factor = scale * lift(from_start[0]);
    const auto share = [=](int m, int row) { return m == 1 ? factor * from_start[row] : 1.f; };
    if (!back)
      split_rows<kChunk, S::kKeys, S::kKeyRow, S::kThreads>({k}, thread);
    else if (kAlike)
      split_rows<kChunk, S::kKeys, S::kKeyRow, S::kThreads>({k, q, values}, thread, share);
    else
      split_rows<kChunk, S::kKeys, S::kKeyRow, S::kThreads>({k, q}, thread, share);
    if (back && !kAlike)
      split_rows<kChunk, kBlockCols, S::kValueRow, S::kThreads>({values}, thread);
  }

  // Waits for the chunk of turn i, and starts on one that comes later.
  __device__ __forceinline__ void turn(float* shared, int i) const {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // others have brought what is split here, and have read the chunk before
    fetch(shared, i + kStages - 1);
    split(shared, i);
    __syncthreads();
  }
};

// Zeros for the tokens after the last sequence, which belong to none.
template <int K>
__device__ __forceinline__ void clear_tail(const CallArgs& a, const GradArgs& g, long long h,
                                           long long stop, float* dv, int cols, bool direct) {
  for (long long e = threadIdx.x; e < (a.T - stop) * cols; e += blockDim.x)
    dv[(stop + e / cols) * a.y_stride[1] + e % cols] = 0;
  if (!direct) return;
  for (long long e = threadIdx.x; e < (a.T - stop) * K; e += blockDim.x) {
    const long long at = ((stop + e / K) * a.H + h) * K + e % K;
    static_cast<float*>(g.dq)[at] = static_cast<float*>(g.dk)[at] = 0;
  }
  for (long long t = stop + threadIdx.x; t < a.T; t += blockDim.x) {
    put_scalar<float>(g.dgate, t * a.H + h, 0.f, a.gate_kind);
    put_scalar<float>(g.dbeta, t * a.H + h, 0.f, a.beta_kind);
  }
}
