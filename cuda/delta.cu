// The delta rule in chunks of 64 tokens on tensor cores, for bfloat16:
//
//   W = (I + A)^-1 diag(beta) (V - diag(d) K S)    A_ij = beta_i D_ij k_i . k_j for j < i
//   Y = diag(d) Q S + P W                          P_ij = D_ij q_i . k_j for j <= i
//   S <- d_63 S + sum_j D_63,j k_j w_j^T
//
// with D_ij = gate_{j+1} ... gate_i and d_i = gate_0 ... gate_i (decay.cuh): the chunked form of
// Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024, with products of gates in place of
// their logarithms. Products are of bfloat16 numbers, sums and the state are float32.
//
// A block walks through the chunks of a sequence for kBlockCols columns of V of one head. Its warps
// have roles: each of the first keeps 16 columns of the state in registers and needs no other such
// warp; four make the inverse and P of the next chunk (inverse.cuh), one of them also the decays of
// the chunk after it, two copy q, k and v, kStages - 2 chunks ahead. One barrier a chunk.
#include "chunk.cuh"
#include "delta_tiles.cuh"

constexpr int kPad = 8;  // 16-bit numbers after each row in shared memory: rows in different banks
template <int K>
constexpr bool kAlwaysExact = K <= 32;  // so few dimensions that random keys are much alike
constexpr int kWeights = 3;             // of the chunk at hand, of the next one, and in the making

struct Tables {
  ChunkTables chunk[2];  // by the parity of the chunk
  Workbench bench;
  Weights weights[kWeights];
  GateRing gates;
};

template <int K, int V, int kBlockCols, int kStages>
struct Shape {
  static constexpr int kRows = (K + 15) / 16 * 16, kRowTiles = kRows / 16;  // of the state
  static constexpr int kColBlocks = (V + kBlockCols - 1) / kBlockCols;
  static constexpr int kColWarps = kBlockCols / 16;
  static constexpr int kThreads = 32 * (kColWarps + kInverters);
  static constexpr int kKeyRow = kRows + kPad, kValueRow = kBlockCols + kPad;  // 16-bit numbers
  static constexpr int kQuery = kChunk * kKeyRow;
  static constexpr int kStage = 2 * kQuery + kChunk * kValueRow;
  static constexpr int kBytes = 2 * kStages * kStage + static_cast<int>(sizeof(Tables));
};

// Gates and betas of one head, and what weighs tokens with them, by one warp.
struct WeightMaker {
  const CallArgs& a;
  Tables& tables;
  long long b, h, start, stop;
  int lane;

  __device__ __forceinline__ void fetch(int c) const {
    const long long t = start + static_cast<long long>(c) * kChunk;
    tables.gates.fetch(c % GateRing::kSlots, a, b, h, t, stop, lane);
  }

  __device__ __forceinline__ void begin() const {
    for (int c = 0; c < GateRing::kSlots - 1; c++) fetch(c);
    make(0);
  }

  // Of chunk c, when those up to c + kSlots - 2 have been fetched.
  __device__ __forceinline__ void make(int c) const {
    const long long left = stop - start - static_cast<long long>(c) * kChunk;
    Weights& weights = tables.weights[c % kWeights];
    float gate[2], beta[2];
    cp_async_wait<GateRing::kSlots - 2>();
    tables.gates.read(gate, beta, c % GateRing::kSlots, a, left, lane);
    weights.decay.fill(lane, gate[0], gate[1], 1, 1);
    *reinterpret_cast<float2*>(weights.beta + 2 * lane) = {beta[0], beta[1]};
    __syncwarp();
    weights.decay.fill_diagonal(lane);
  }
};

// Half of the rows of q, k and v of one head, on their way into shared memory by one warp.
template <class S, int K, int kBlockCols, int kStages, bool kWide>
struct RowCopier {
  const CallArgs& a;
  unsigned short* stages;
  const unsigned short *q, *k, *v;  // of the first token
  long long tokens;
  int cols, half, lane;

  __device__ __forceinline__ void fetch(int c) const {
    const long long t = static_cast<long long>(c) * kChunk + half * kCopyRows;
    const int rows = static_cast<int>(min(tokens - t, static_cast<long long>(kCopyRows)));
    unsigned short* const stage = stages + c % kStages * S::kStage;
    unsigned short* const queries = stage + half * kCopyRows * S::kKeyRow;
    unsigned short* const values = stage + 2 * S::kQuery + half * kCopyRows * S::kValueRow;
    if (static_cast<long long>(c) * kChunk < tokens) {
      copy_rows<K, S::kKeyRow, kWide>(queries, q + t * a.q_stride[1], a.q_stride[1], rows, K, lane);
      copy_rows<K, S::kKeyRow, kWide>(queries + S::kQuery, k + t * a.k_stride[1], a.k_stride[1],
                                      rows, K, lane);
      copy_rows<kBlockCols, S::kValueRow, kWide>(values, v + t * a.v_stride[1], a.v_stride[1], rows,
                                                 cols, lane);
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void begin() const {
#pragma unroll 1
    for (int c = 0; c < kStages - 1; c++) fetch(c);
  }
};

// A warp that makes row r of the tables of each chunk, one chunk ahead of the state. What else is
// to be done goes to warps with short rows: the first makes the weights of the chunk after that,
// the next two copy.
template <class S, int r, int kStages, bool kNormalise, class Copier>
__device__ __forceinline__ void prepare(Tables& tables, const unsigned short* stages, int chunks,
                                        const WeightMaker& weights, const Copier& copier) {
  constexpr bool kCopies = r == 1 || r == 2;
  if (r == 0) weights.begin();
  if (kCopies) copier.begin();
  for (int c = 0; c <= chunks; c++) {
    if (kCopies) cp_async_wait<kStages - 3>();
    __syncthreads();
    if (kCopies && c > 0) copier.fetch(c + kStages - 2);
    if (r == 0) weights.fetch(c + GateRing::kSlots - 1);
    if (c < chunks) {
      const unsigned short* const q = stages + c % kStages * S::kStage;
      BlockRow<S, r, kNormalise>{weights.lane}.make(tables.chunk[c % 2], tables.bench, q,
                                                    q + S::kQuery, tables.weights[c % kWeights]);
    }
    if (r == 0) weights.make(c + 1);
  }
}

// 16 columns of a chunk's outputs, of which `tokens` and `cols` are real, into global memory.
template <class S, bool kWide>
__device__ __forceinline__ void store_outputs(unsigned short* y, long long stride,
                                              const unsigned short* from, int tokens, int cols,
                                              int lane) {
  constexpr int kStep = kWide ? 8 : 1, kSteps = 16 / kStep;
#pragma unroll 1
  for (int e = lane; e < kChunk * kSteps; e += 32) {
    const int t = e / kSteps, at = e % kSteps * kStep;
    if (t < tokens && at < cols)
      *reinterpret_cast<Run<unsigned short, kStep>*>(y + t * stride + at) =
          *reinterpret_cast<const Run<unsigned short, kStep>*>(from + t * S::kValueRow + at);
  }
}

// grid: N * H * ceil(V / kBlockCols). block: Shape::kThreads. With kWide all rows of q, k, v and y
// begin at multiples of 16 bytes and hold whole vectors of 8. kNormalise makes rows of q and k of
// unit length.
template <int K, int V, int kBlockCols, int kStages, bool kWide, bool kNormalise>
__global__ void __launch_bounds__(Shape<K, V, kBlockCols, kStages>::kThreads, 1)
    delta(const CallArgs a) {
  using S = Shape<K, V, kBlockCols, kStages>;
  static_assert(kBlockCols % 16 == 0, "a warp has 16 columns");
  static_assert(kStages >= 3, "one chunk at hand, one being prepared, one on its way");
  static_assert(!kWide || (K % 8 == 0 && V % 8 == 0), "rows of whole vectors");
  DYNAMIC_SHARED(unsigned short, shared);
  Tables& tables = *reinterpret_cast<Tables*>(shared + kStages * S::kStage);
  for (int i = threadIdx.x; i < kStages * S::kStage; i += S::kThreads) shared[i] = 0;  // padding

  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int col0 = static_cast<int>(blockIdx.x % S::kColBlocks) * kBlockCols;
  const int cols = min(kBlockCols, V - col0);
  const long long nh = blockIdx.x / S::kColBlocks, n = nh / a.H, h = nh % a.H;
  const Sequence seq = sequence(a, n);
  const long long b = seq.b, start = seq.start, stop = seq.stop;
  const int chunks = static_cast<int>((stop - start + kChunk - 1) / kChunk);
  unsigned short* const y =
      static_cast<unsigned short*>(a.y) + b * a.y_stride[0] + h * a.y_stride[2] + col0;
  if (a.cu_seqlens && n == a.N - 1)  // tokens of no sequence
    for (long long e = threadIdx.x; e < (a.T - stop) * cols; e += S::kThreads)
      y[(stop + e / cols) * a.y_stride[1] + e % cols] = 0;
  __syncthreads();

  if (warp < S::kColWarps) {
    const int own0 = warp * 16;
    StateColumns<S, kNormalise> state;
    state.clear();
    if (a.initial_state)
      state.load(static_cast<const float*>(a.initial_state) + n * a.state_stride[0] +
                     h * a.state_stride[1] + (col0 + own0) * a.state_stride[3],
                 a.state_stride[2], a.state_stride[3], K, cols - own0, lane);
    const float scale = static_cast<float>(a.scale);
    const int tail = static_cast<int>((stop - start - 1) % kChunk) + 1;  // tokens of the last chunk
    unsigned short* to = y + start * a.y_stride[1] + own0;
    __syncthreads();
    if (chunks > 0) pass_by_inverters<kNormalise>();
    for (int c = 0; c < chunks; c++, to += kChunk * a.y_stride[1]) {
      __syncthreads();
      if (c + 1 < chunks) pass_by_inverters<kNormalise>();
      unsigned short* const q = shared + c % kStages * S::kStage;
      unsigned short* const k = q + S::kQuery;
      unsigned short* const v = k + S::kQuery + own0;
      const ChunkTables& chunk = tables.chunk[c % 2];
      const Weights& weights = tables.weights[c % kWeights];
      if (kAlwaysExact<K> || chunk.strained() || weights.decay.wild)
        state.template step<true>(q, k, v, chunk, weights, scale, lane);
      else
        state.template step<kAlwaysExact<K>>(q, k, v, chunk, weights, scale, lane);
      __syncwarp();
      store_outputs<S, kWide>(to, a.y_stride[1], v, c < chunks - 1 ? kChunk : tail, cols - own0,
                              lane);
    }
    if (a.state) {
      float* const kept = static_cast<float*>(a.state) + nh * (K * V) + col0;
      state.each(lane, [&](float& s, int row, int i) {
        if (row < K && own0 + i < cols) kept[row * V + own0 + i] = s;
      });
    }
  } else {
    const int r = kInverters - 1 - (warp - S::kColWarps);
    const long long hq = h / a.group;
    const WeightMaker weights = {a, tables, b, h, start, stop, lane};
    const auto rows = [&](const void* x, const long long (&stride)[3], long long head) {
      return static_cast<const unsigned short*>(x) + b * stride[0] + start * stride[1] +
             head * stride[2];
    };
    const RowCopier<S, K, kBlockCols, kStages, kWide> copier = {a,
                                                                shared,
                                                                rows(a.q, a.q_stride, hq),
                                                                rows(a.k, a.k_stride, hq),
                                                                rows(a.v, a.v_stride, h) + col0,
                                                                stop - start,
                                                                cols,
                                                                r - 1,
                                                                lane};
    if (r == 0) prepare<S, 0, kStages, kNormalise>(tables, shared, chunks, weights, copier);
    if (r == 1) prepare<S, 1, kStages, kNormalise>(tables, shared, chunks, weights, copier);
    if (r == 2) prepare<S, 2, kStages, kNormalise>(tables, shared, chunks, weights, copier);
    if (r == 3) prepare<S, 3, kStages, kNormalise>(tables, shared, chunks, weights, copier);
  }
}
