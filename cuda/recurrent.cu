// Both recurrences, token by token, the state in registers:
//
//   linear   S = gate * S + beta * k v^T                      y = scale * q S
//   delta    R = gate * S;  S = R + beta * k (v - k^T R)^T    y = scale * q S
//
// A block owns kBlockCols columns of V of one head of one sequence; columns never meet in either
// rule, so blocks and warps share nothing but k and q. In a warp, kRows lanes split the K rows of a
// column and 32 / kRows lane groups split the columns, kCols for each.
//
// Tokens are fetched kTokens at a time: a thread starts the loads of the next block of tokens,
// works through the block that lies in shared memory while they are under way, then stores them
// into the other half of shared memory. One barrier a block of tokens; none within it.
#include "types.cuh"

enum Rule { kLinear = 0, kDelta = 1 };

// How gate and beta are stored.
enum Scalars { kAbsent = 0, kAsInputs = 1, kAsFloat = 2, kLogOfInputs = 3, kLogOfFloat = 4 };

// Strides count elements, over (B, T, H); the last axis of q, k, v and y has stride 1.
struct RecurrentArgs {
  const void* q;              // (B, T, Hq, K)
  const void* k;              // (B, T, Hq, K)
  const void* v;              // (B, T, H, V)
  const void* gate;           // (B, T, H)
  const void* beta;           // (B, T, H)
  const void* initial_state;  // (N, H, K, V) with any strides, or null
  const void* cu_seqlens;     // (N + 1), or null: N = B sequences of T tokens
  void* y;                    // (B, T, H, V)
  void* state;                // (N, H, K, V) contiguous, or null
  long long q_stride[3], k_stride[3], v_stride[3], gate_stride[3], beta_stride[3], y_stride[3];
  long long state_stride[4];  // of initial_state
  long long offset_stride;    // of cu_seqlens
  long long T, H, group, N;   // group = H / Hq
  double scale;
  int gate_kind, beta_kind;  // Scalars
  int offset_bytes;          // 4 or 8: int32 or int64 cu_seqlens
  int padding;
};

// How the K rows of a column are laid over kRows lanes: runs of kRun neighbours, so that a warp
// reads kRows * kRun consecutive numbers of k or q at once, as vectors where the run allows.
template <class State, int K, int kRows>
struct RowMap {
  static constexpr int kEach = (K + kRows - 1) / kRows;
  static constexpr int kVector = 16 / sizeof(State);
  static constexpr int kRun = kEach % kVector == 0 ? kVector : (kEach % 2 == 0 ? 2 : 1);
  static constexpr int kPadded = kRows * kEach;
  static __device__ __forceinline__ int row(int lane_row, int i) {
    return (i / kRun * kRows + lane_row) * kRun + i % kRun;
  }
};

template <class T, int n>
struct alignas(sizeof(T) * n) Run {
  T x[n];
};

// Sum over the kRows lanes that share a column; every one of them gets it.
template <int kRows, class T>
__device__ __forceinline__ T sum_rows(T x) {
#pragma unroll
  for (int step = 1; step < kRows; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

template <class In, class State>
__device__ __forceinline__ State load_scalar(const void* base, long long at, int kind) {
  if (kind == kAbsent) return State(1);
  const bool narrow = kind == kAsInputs || kind == kLogOfInputs;
  const State x = narrow ? widen<State>(static_cast<const In*>(base)[at])
                         : widen<State>(static_cast<const float*>(base)[at]);
  return kind == kLogOfInputs || kind == kLogOfFloat ? exp(x) : x;
}

// First or one past the last token of a sequence; offsets on the device were checked by nobody.
__device__ __forceinline__ long long offset(const RecurrentArgs& a, long long n) {
  const long long at = n * a.offset_stride;
  const long long x = a.offset_bytes == 4 ? static_cast<const int*>(a.cu_seqlens)[at]
                                          : static_cast<const long long*>(a.cu_seqlens)[at];
  return x < 0 ? 0 : (x > a.T ? a.T : x);
}

// A block of tokens on its way from global memory through registers into shared memory.
template <class In, class State, int K, int kPaddedK, int kBlockCols, int kTokens, int kThreads>
struct Fetch {
  static constexpr int kOfK = (kTokens * K + kThreads - 1) / kThreads;
  static constexpr int kOfV = (kTokens * kBlockCols + kThreads - 1) / kThreads;
  In q[kOfK], k[kOfK], v[kOfV];
  State gate, beta;

  static constexpr int kSlot = kTokens * (2 * kPaddedK + kBlockCols + 2);  // of State, one half
  static __device__ __forceinline__ State* q_at(State* slot) { return slot; }
  static __device__ __forceinline__ State* k_at(State* slot) { return slot + kTokens * kPaddedK; }
  static __device__ __forceinline__ State* v_at(State* slot) {
    return slot + 2 * kTokens * kPaddedK;
  }
  static __device__ __forceinline__ State* gate_at(
      State* slot) {  // gate and beta of a token, paired
    return slot + kTokens * (2 * kPaddedK + kBlockCols);
  }

  __device__ __forceinline__ void load(const RecurrentArgs& a, const In* q0, const In* k0,
                                       const In* v0, long long gate0, long long beta0, int tokens,
                                       int cols) {
#pragma unroll
    for (int i = 0; i < kOfK; i++) {
      const int e = i * kThreads + static_cast<int>(threadIdx.x), t = e / K;
      const bool real = t < tokens;
      q[i] = real ? q0[t * a.q_stride[1] + e % K] : In{};
      k[i] = real ? k0[t * a.k_stride[1] + e % K] : In{};
    }
#pragma unroll
    for (int i = 0; i < kOfV; i++) {
      const int e = i * kThreads + static_cast<int>(threadIdx.x), t = e / kBlockCols;
      const bool real = t < tokens && e % kBlockCols < cols;
      v[i] = real ? v0[t * a.v_stride[1] + e % kBlockCols] : In{};
    }
    const int t = threadIdx.x;
    const bool real = t < tokens;
    gate =
        real ? load_scalar<In, State>(a.gate, gate0 + t * a.gate_stride[1], a.gate_kind) : State(0);
    beta =
        real ? load_scalar<In, State>(a.beta, beta0 + t * a.beta_stride[1], a.beta_kind) : State(0);
  }

  __device__ __forceinline__ void store(State* slot) const {
#pragma unroll
    for (int i = 0; i < kOfK; i++) {
      const int e = i * kThreads + static_cast<int>(threadIdx.x), at = e / K * kPaddedK + e % K;
      if (e < kTokens * K) {
        q_at(slot)[at] = widen<State>(q[i]);
        k_at(slot)[at] = widen<State>(k[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kOfV; i++) {
      const int e = i * kThreads + static_cast<int>(threadIdx.x);
      if (e < kTokens * kBlockCols) v_at(slot)[e] = widen<State>(v[i]);
    }
    if (threadIdx.x < kTokens) {
      gate_at(slot)[2 * threadIdx.x] = gate;
      gate_at(slot)[2 * threadIdx.x + 1] = beta;
    }
  }
};

// The part of the state that one thread keeps: kEach rows of kCols columns.
template <class State, int kRule, bool kNormalise, int K, int kRows, int kCols>
struct Tile {
  using Map = RowMap<State, K, kRows>;
  static constexpr int kEach = Map::kEach;
  State s[kEach][kCols];

  // One token; returns y of the columns, summed over the rows, in y.
  __device__ __forceinline__ void step(const State* q_row, const State* k_row, const State* v_cols,
                                       State gate, State beta, int lane_row, State (&y)[kCols]) {
    State q[kEach], k[kEach];
    read(q, q_row, lane_row);
    read(k, k_row, lane_row);
    State q_norm = 1, k_norm = 1;  // 1 / length
    if (kNormalise) {
      q_norm = inverse_length(q);
      k_norm = inverse_length(k);
    }
    State u[kCols];
#pragma unroll
    for (int c = 0; c < kCols; c++) u[c] = v_cols[c];
    if (kRule == kDelta) {
      State p[kCols] = {};
#pragma unroll
      for (int i = 0; i < kEach; i++)
#pragma unroll
        for (int c = 0; c < kCols; c++) p[c] += k[i] * s[i][c];
#pragma unroll
      for (int c = 0; c < kCols; c++) u[c] -= gate * (k_norm * sum_rows<kRows>(p[c]));
    }
#pragma unroll
    for (int c = 0; c < kCols; c++) {
      u[c] *= beta * k_norm;
      y[c] = 0;
    }
#pragma unroll
    for (int i = 0; i < kEach; i++)
#pragma unroll
      for (int c = 0; c < kCols; c++) {
        s[i][c] = gate * s[i][c] + k[i] * u[c];
        y[c] += q[i] * s[i][c];
      }
#pragma unroll
    for (int c = 0; c < kCols; c++) y[c] = q_norm * sum_rows<kRows>(y[c]);
  }

 private:
  static __device__ __forceinline__ void read(State (&x)[kEach], const State* row, int lane_row) {
    constexpr int kRun = Map::kRun;
#pragma unroll
    for (int i = 0; i < kEach; i += kRun) {
      const auto run = *reinterpret_cast<const Run<State, kRun>*>(row + Map::row(lane_row, i));
#pragma unroll
      for (int j = 0; j < kRun; j++) x[i + j] = run.x[j];
    }
  }

  static __device__ __forceinline__ State inverse_length(const State (&x)[kEach]) {
    State sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) sum += x[i] * x[i];
    return State(1) / sqrt(sum_rows<kRows>(sum) + State(1e-6));
  }
};

// grid: any number of blocks; items = N * H * ceil(V / kBlockCols) are dealt out in turns.
// block: kThreads. Warps from kWarps on only help to fetch.
template <class In, class State, int kRule, bool kNormalise, int K, int V, int kRows, int kCols,
          int kWarps, int kThreads, int kTokens>
__global__ void __launch_bounds__(kThreads, 1) recurrent(const RecurrentArgs a) {
  static_assert(kRows >= 1 && kRows <= 32 && (kRows & (kRows - 1)) == 0,
                "rows split over 2^n lanes");
  static_assert(kThreads >= 32 * kWarps && kThreads % 32 == 0,
                "whole warps, the computing ones first");
  static_assert(kTokens <= kThreads, "one thread fetches gate and beta of one token");
  using Map = RowMap<State, K, kRows>;
  using Kept = typename Storage<In>::State;  // of the states in global memory
  constexpr int kWarpCols = 32 / kRows * kCols, kBlockCols = kWarps * kWarpCols;
  constexpr int kColBlocks = (V + kBlockCols - 1) / kBlockCols;
  using Tokens = Fetch<In, State, K, Map::kPadded, kBlockCols, kTokens, kThreads>;

  DYNAMIC_SHARED(State, shared);  // two halves of Tokens::kSlot
  for (int i = threadIdx.x; i < 2 * Tokens::kSlot; i += kThreads)
    shared[i] = 0;  // rows past K stay 0
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int lane_row = lane % kRows, warp_col = warp * kWarpCols + lane / kRows * kCols;
  const bool computes = warp < kWarps;
  const State scale = static_cast<State>(a.scale);

  for (long long item = blockIdx.x; item < a.N * a.H * kColBlocks; item += gridDim.x) {
    const long long nh = item / kColBlocks, n = nh / a.H, h = nh % a.H;
    const int col0 = static_cast<int>(item % kColBlocks) * kBlockCols;
    const int cols = min(kBlockCols, V - col0);
    const long long b = a.cu_seqlens ? 0 : n;
    const long long start = a.cu_seqlens ? offset(a, n) : 0;
    const long long last = a.cu_seqlens ? offset(a, n + 1) : a.T;
    const long long stop = last > start ? last : start;

    const In* q = static_cast<const In*>(a.q) + b * a.q_stride[0] + start * a.q_stride[1] +
                  h / a.group * a.q_stride[2];
    const In* k = static_cast<const In*>(a.k) + b * a.k_stride[0] + start * a.k_stride[1] +
                  h / a.group * a.k_stride[2];
    const In* v = static_cast<const In*>(a.v) + b * a.v_stride[0] + start * a.v_stride[1] +
                  h * a.v_stride[2] + col0;
    In* y = static_cast<In*>(a.y) + b * a.y_stride[0] + start * a.y_stride[1] + h * a.y_stride[2] +
            col0;
    long long gate = b * a.gate_stride[0] + start * a.gate_stride[1] + h * a.gate_stride[2];
    long long beta = b * a.beta_stride[0] + start * a.beta_stride[1] + h * a.beta_stride[2];

    Tile<State, kRule, kNormalise, K, kRows, kCols> tile;
#pragma unroll
    for (int i = 0; i < Map::kEach; i++)
#pragma unroll
      for (int c = 0; c < kCols; c++) {
        const int row = Map::row(lane_row, i), col = warp_col + c;
        const bool real = a.initial_state && computes && row < K && col < cols;
        tile.s[i][c] =
            real ? State(static_cast<const Kept*>(
                       a.initial_state)[n * a.state_stride[0] + h * a.state_stride[1] +
                                        row * a.state_stride[2] + (col0 + col) * a.state_stride[3]])
                 : State(0);
      }

    Tokens next;
    long long left = stop - start;
    next.load(a, q, k, v, gate, beta, static_cast<int>(left < kTokens ? left : kTokens), cols);
    next.store(shared);
    __syncthreads();
    for (int half = 0; left > 0; half ^= 1) {
      const int tokens = static_cast<int>(left < kTokens ? left : kTokens);
      left -= tokens;
      q += kTokens * a.q_stride[1];
      k += kTokens * a.k_stride[1];
      v += kTokens * a.v_stride[1];
      gate += kTokens * a.gate_stride[1];
      beta += kTokens * a.beta_stride[1];
      if (left > 0)
        next.load(a, q, k, v, gate, beta, static_cast<int>(left < kTokens ? left : kTokens), cols);
      State* const slot = shared + half * Tokens::kSlot;
      if (computes) {
#pragma unroll 4
        for (int t = 0; t < tokens; t++) {
          State out[kCols];
          const State* scalars = Tokens::gate_at(slot) + 2 * t;
          tile.step(Tokens::q_at(slot) + t * Map::kPadded, Tokens::k_at(slot) + t * Map::kPadded,
                    Tokens::v_at(slot) + t * kBlockCols + warp_col, scalars[0], scalars[1],
                    lane_row, out);
#pragma unroll
          for (int c = 0; c < kCols; c++)
            if (lane_row == c % kRows && warp_col + c < cols)
              y[t * a.y_stride[1] + warp_col + c] = Narrow<In>::from(scale * out[c]);
        }
      }
      y += kTokens * a.y_stride[1];
      if (left > 0) next.store(shared + (half ^ 1) * Tokens::kSlot);
      __syncthreads();
    }

    if (a.state && computes) {
      Kept* const kept = static_cast<Kept*>(a.state) + nh * K * V + col0;
#pragma unroll
      for (int i = 0; i < Map::kEach; i++)
#pragma unroll
        for (int c = 0; c < kCols; c++) {
          const int row = Map::row(lane_row, i), col = warp_col + c;
          if (row < K && col < cols) kept[row * V + col] = static_cast<Kept>(tile.s[i][c]);
        }
    }
    if (a.cu_seqlens && n == a.N - 1) {  // tokens after the last sequence belong to none: y = 0
      In* const rest = static_cast<In*>(a.y) + h * a.y_stride[2] + col0;
      for (long long e = threadIdx.x; e < (a.T - stop) * cols; e += kThreads)
        rest[(stop + e / cols) * a.y_stride[1] + e % cols] = Narrow<In>::from(State(0));
    }
  }
}
