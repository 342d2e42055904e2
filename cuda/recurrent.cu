// Both recurrences, token by token, the state in registers:
//
//   linear   S = gate * S + beta * k v^T                      y = scale * q S
//   delta    R = gate * S;  S = R + beta * k (v - k^T R)^T    y = scale * q S
//
// A block owns kBlockCols columns of V of one head of one sequence; columns never meet in either
// rule, so blocks and warps share nothing but what they read. In a warp, kRows lanes split the K
// rows of a column and 32 / kRows lane groups split the columns, kCols for each.
//
// Tokens are fetched kTokens at a time: a thread starts the loads of the next block of tokens,
// works through the block that lies in shared memory while they are under way, then stores them
// into the other half of shared memory. One barrier a block of tokens; none within it. Outputs are
// summed over lanes kGroup tokens at a time, which keeps those sums off the chain from state to
// state.
#include "call.cuh"
#include "rows.cuh"
#include "tokens.cuh"

constexpr int kGroup = 4;  // tokens

// The part of the state that one thread keeps: kEach rows of kCols columns.
template <class State, int kRule, bool kNormalise, int K, int kRows, int kCols>
struct Tile {
  using Map = RowMap<State, K, kRows>;
  static constexpr int kEach = Map::kEach;
  static constexpr int kParts = kCols >= 4 ? 1 : 4 / kCols;  // sums made side by side
  State s[kEach][kCols];

  // One token; y gets this lane's part of the outputs, without the scale.
  __device__ __forceinline__ void step(const State* q_row, const State* k_row, const State* v_cols,
                                       const State* gate_beta, int lane_row, State* y) {
    State q[kEach], k[kEach], u[kCols];
    Map::read(q, q_row, lane_row);
    Map::read(k, k_row, lane_row);
    const State gate = gate_beta[0];
    const State q_norm = kNormalise ? inverse_length(q) : State(1);
    const State k_norm = kNormalise ? inverse_length(k) : State(1);
    const State strength = gate_beta[1] * k_norm;
    if (kRule == kDelta) {
      State p[kCols];
      times_state(p, k);
#pragma unroll
      for (int c = 0; c < kCols; c++)
        u[c] = strength * (v_cols[c] - gate * (k_norm * sum_rows<kRows>(p[c])));
    } else {
#pragma unroll
      for (int c = 0; c < kCols; c++) u[c] = strength * v_cols[c];
    }
#pragma unroll
    for (int i = 0; i < kEach; i++)
#pragma unroll
      for (int c = 0; c < kCols; c++) s[i][c] = gate * s[i][c] + k[i] * u[c];
    State out[kCols];
    times_state(out, q);
#pragma unroll
    for (int c = 0; c < kCols; c++) y[c] = kNormalise ? q_norm * out[c] : out[c];
  }

 private:
  // x^T s over this lane's rows.
  __device__ __forceinline__ void times_state(State (&sums)[kCols], const State (&x)[kEach]) const {
    State part[kParts][kCols] = {};
#pragma unroll
    for (int i = 0; i < kEach; i++)
#pragma unroll
      for (int c = 0; c < kCols; c++) part[i % kParts][c] += x[i] * s[i][c];
#pragma unroll
    for (int width = kParts / 2; width > 0; width /= 2)
#pragma unroll
      for (int i = 0; i < width; i++)
#pragma unroll
        for (int c = 0; c < kCols; c++) part[i][c] += part[i + width][c];
#pragma unroll
    for (int c = 0; c < kCols; c++) sums[c] = part[0][c];
  }

  static __device__ __forceinline__ State inverse_length(const State (&x)[kEach]) {
    State sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++) sum += x[i] * x[i];
    return State(1) / sqrt(sum_rows<kRows>(sum) + State(1e-6));
  }
};

// grid: any number of blocks; N * H * ceil(V / kBlockCols) items are dealt out in turns.
// block: kThreads. Warps from kWarps on only help to fetch. q, k and v are read kWide numbers at
// once: their addresses and strides are whole multiples of that.
template <class In, class State, int kRule, bool kNormalise, int K, int V, int kRows, int kCols,
          int kWarps, int kThreads, int kTokens, int kWide>
__global__ void __launch_bounds__(kThreads, 1) recurrent(const CallArgs a) {
  static_assert(kRows >= 1 && kRows <= 32 && (kRows & (kRows - 1)) == 0, "rows over 2^n lanes");
  static_assert(kThreads >= 32 * kWarps && kThreads % 32 == 0, "whole warps, computing ones first");
  static_assert(kTokens % kGroup == 0, "whole groups of tokens");
  static_assert(V % kWide == 0, "no run of v ends past the columns");
  using Map = RowMap<State, K, kRows>;
  using Kept = typename Storage<In>::State;
  constexpr int kWarpCols = 32 / kRows * kCols, kBlockCols = kWarps * kWarpCols;
  constexpr int kColBlocks = (V + kBlockCols - 1) / kBlockCols;
  constexpr int kShare = kGroup * kCols > kRows ? kGroup * kCols / kRows : 1;
  using Tokens = Fetch<In, State, K, Map::kPadded, kBlockCols, kTokens, kThreads, kWide>;
  using Slot = typename Tokens::Slot;

  DYNAMIC_SHARED(State, shared);                                                // two slots
  for (int i = threadIdx.x; i < 2 * Slot::kSize; i += kThreads) shared[i] = 0;  // the padding
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int lane_row = lane % kRows, warp_col = warp * kWarpCols + lane / kRows * kCols;
  const bool computes = warp < kWarps;
  const State scale = static_cast<State>(a.scale);

  for (long long item = blockIdx.x; item < a.N * a.H * kColBlocks; item += gridDim.x) {
    const long long nh = item / kColBlocks, n = nh / a.H, h = nh % a.H, hq = h / a.group;
    const int col0 = static_cast<int>(item % kColBlocks) * kBlockCols;
    const int cols = min(kBlockCols, V - col0);
    const auto [b, start, stop] = sequence(a, n);

    Source<In> from;
    from.q = static_cast<const In*>(a.q) + b * a.q_stride[0] + hq * a.q_stride[2];
    from.k = static_cast<const In*>(a.k) + b * a.k_stride[0] + hq * a.k_stride[2];
    from.v = static_cast<const In*>(a.v) + b * a.v_stride[0] + h * a.v_stride[2] + col0;
    from.gate = a.gate;
    from.beta = a.beta;
    from.gate_at = b * a.gate_stride[0] + h * a.gate_stride[2];
    from.beta_at = b * a.beta_stride[0] + h * a.beta_stride[2];
    from.q_stride = a.q_stride[1];
    from.k_stride = a.k_stride[1];
    from.v_stride = a.v_stride[1];
    from.gate_stride = a.gate_stride[1];
    from.beta_stride = a.beta_stride[1];
    from.gate_kind = a.gate_kind;
    from.beta_kind = a.beta_kind;
    from.advance(start);
    In* y = static_cast<In*>(a.y) + b * a.y_stride[0] + h * a.y_stride[2] + col0;

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
    next.load(from, stop - start, cols);
    next.store({shared}, from);
    __syncthreads();
    int half = 0;
    for (long long t0 = start; t0 < stop; t0 += kTokens, half ^= 1) {
      const int tokens = static_cast<int>(min(stop - t0, static_cast<long long>(kTokens)));
      const bool more = t0 + kTokens < stop;
      if (more) {
        from.advance(kTokens);
        next.load(from, stop - t0 - kTokens, cols);
      }
      const Slot slot{shared + half * Slot::kSize};
      if (computes) {
        for (int g = 0; g < tokens; g += kGroup) {
          State out[kGroup * kCols];
#pragma unroll
          for (int t = 0; t < kGroup; t++)
            tile.step(slot.q(g + t), slot.k(g + t), slot.v(g + t) + warp_col, slot.gate_beta(g + t),
                      lane_row, out + t * kCols);
          const int first = share_sums<kRows, kGroup * kCols>(out, lane_row);
#pragma unroll
          for (int i = 0; i < kShare; i++) {
            const int t = g + (first + i) / kCols, col = warp_col + (first + i) % kCols;
            if (t < tokens && col < cols && lane_row < kGroup * kCols)
              y[(t0 + t) * a.y_stride[1] + col] = Narrow<In>::from(scale * out[i]);
          }
        }
      }
      if (more) next.store({shared + (half ^ 1) * Slot::kSize}, from);
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
    if (a.cu_seqlens && n == a.N - 1)  // tokens after the last sequence belong to none: y = 0
      for (long long e = threadIdx.x; e < (a.T - stop) * cols; e += kThreads)
        y[(stop + e / cols) * a.y_stride[1] + e % cols] = Narrow<In>::from(State(0));
  }
}
