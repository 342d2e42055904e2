// Gradients of both recurrences, token by token. Forward through the tokens for the states, back
// for the gradients, where d is the gradient of the state (K, V), s the state before a token, and e
// what it writes: v, or v - k^T R in the delta rule.
//
//   d = d + scale * q dy^T
//   w = d^T k          dbeta = w . e          dv = beta * w
//   dq = scale * (gate * s + beta * k e^T) dy
//   dk = beta * d e                           delta: - gate * s dv
//                                             delta: d = d - k dv^T
//   dgate = <d, s>     d = gate * d
//
// A block owns kBlockCols columns of V of one head of one sequence, laid over lanes as in
// recurrent.cu. Columns meet in dq, dk, dgate and dbeta alone: a block adds up its own, and
// finish_grad those of all blocks. On the way forward the state is stored in global memory before
// every kTokens tokens; on the way back those tokens are run again, with the state stored in
// shared memory before every kGroup tokens, and once more inside each group. What a thread
// stores of a state it alone reads.
#include "grad.cuh"
#include "rows.cuh"

// Some tokens in shared memory, rows of q and k padded with zeros to kPaddedK, all of type State.
template <class State, int kPaddedK, int kCols, int kTokens>
struct Slot {
  static constexpr int kSize = kTokens * (2 * kPaddedK + 2 * kCols + 2);
  State* base;

  __device__ __forceinline__ State* q(int t) const { return base + t * kPaddedK; }
  __device__ __forceinline__ State* k(int t) const { return base + (kTokens + t) * kPaddedK; }
  __device__ __forceinline__ State* e(int t) const {
    return base + 2 * kTokens * kPaddedK + t * kCols;
  }
  __device__ __forceinline__ State* dy(int t) const { return e(kTokens + t); }
  __device__ __forceinline__ State* gate_beta(int t) const { return e(2 * kTokens) + 2 * t; }
};

// Rows of kCols numbers, of which cols are real, into rows of kRow in shared memory, by all
// threads.
template <class In, class State, int kCols, int kRow, int kWide, int kThreads>
__device__ __forceinline__ void fetch_rows(State* to, const In* from, long long stride, int rows,
                                           int cols) {
  constexpr int kRun = kWide * sizeof(In) > 16 ? 16 / sizeof(In) : kWide, kRuns = kCols / kRun;
  static_assert(kCols % kRun == 0, "rows are whole runs");
  for (int i = threadIdx.x; i < rows * kRuns; i += kThreads) {
    const int t = i / kRuns, at = i % kRuns * kRun;
    Run<In, kRun> run{};
    if (at < cols) run = *reinterpret_cast<const Run<In, kRun>*>(from + t * stride + at);
#pragma unroll
    for (int j = 0; j < kRun; j++) to[t * kRow + at + j] = widen<State>(run.x[j]);
  }
}

// Where the arrays of one head of one sequence begin, at its first token.
template <class In, class State>
struct Head {
  const In *q, *k, *v, *dy;
  State* misses;
  long long gate_at, beta_at, miss_stride;

  __device__ __forceinline__ Head(const CallArgs& a, const GradArgs& g, long long b, long long t,
                                  long long h, int V, int col0) {
    const long long hq = h / a.group;
    q = static_cast<const In*>(a.q) + b * a.q_stride[0] + t * a.q_stride[1] + hq * a.q_stride[2];
    k = static_cast<const In*>(a.k) + b * a.k_stride[0] + t * a.k_stride[1] + hq * a.k_stride[2];
    v = static_cast<const In*>(a.v) + b * a.v_stride[0] + t * a.v_stride[1] + h * a.v_stride[2] +
        col0;
    dy = static_cast<const In*>(g.dy);
    if (dy) dy += b * g.dy_stride[0] + t * g.dy_stride[1] + h * g.dy_stride[2] + col0;
    miss_stride = a.H * V;
    misses = static_cast<State*>(g.misses);
    if (misses) misses += (b * a.T + t) * miss_stride + h * V + col0;
    gate_at = b * a.gate_stride[0] + t * a.gate_stride[1] + h * a.gate_stride[2];
    beta_at = b * a.beta_stride[0] + t * a.beta_stride[1] + h * a.beta_stride[2];
  }
};

// The part of a state or of its gradient that one thread keeps: kEach rows of kCols columns.
template <class State, int K, int kRows, int kCols>
struct Part {
  using Map = RowMap<State, K, kRows>;
  static constexpr int kEach = Map::kEach, kSize = kEach * kCols;
  State x[kEach][kCols];

  __device__ __forceinline__ void save(State* to, int step) const {
#pragma unroll
    for (int i = 0; i < kSize; i++) to[i * step] = x[i / kCols][i % kCols];
  }

  __device__ __forceinline__ void restore(const State* from, int step) {
#pragma unroll
    for (int i = 0; i < kSize; i++) x[i / kCols][i % kCols] = from[i * step];
  }

  // Element (row, col) of an array (N, H, K, V) at n, h; 0 where there is none.
  template <class Kept>
  __device__ __forceinline__ void load(const void* base, const long long* stride, long long n,
                                       long long h, int lane_row, int warp_col, int col0,
                                       int cols) {
    const Kept* const at = static_cast<const Kept*>(base) + n * stride[0] + h * stride[1];
#pragma unroll
    for (int i = 0; i < kEach; i++)
#pragma unroll
      for (int c = 0; c < kCols; c++) {
        const int row = Map::row(lane_row, i), col = warp_col + c;
        const bool real = base && row < K && col < cols;
        x[i][c] = real ? State(at[row * stride[2] + (col0 + col) * stride[3]]) : State(0);
      }
  }

  // x^T k, of all rows.
  __device__ __forceinline__ void times(State (&sums)[kCols], const State (&k)[kEach]) const {
#pragma unroll
    for (int c = 0; c < kCols; c++) {
      State part[2] = {};
#pragma unroll
      for (int i = 0; i < kEach; i++) part[i % 2] += k[i] * x[i][c];
      sums[c] = sum_rows<kRows>(part[0] + part[1]);
    }
  }

  // The state after a token that writes k u^T.
  __device__ __forceinline__ void step(State gate, const State (&k)[kEach],
                                       const State (&u)[kCols]) {
#pragma unroll
    for (int i = 0; i < kEach; i++)
#pragma unroll
      for (int c = 0; c < kCols; c++) x[i][c] = gate * x[i][c] + k[i] * u[c];
  }
};

// grid: any number of blocks; N * H * ceil(V / kBlockCols) items are dealt out in turns.
// block: 32 * kWarps. q, k, v and dy are read kWide numbers at once: their addresses and strides
// are whole multiples of that. States need T / kTokens + N rows (for cu_seqlens; else N times
// ceil(T / kTokens)) of H * ceil(V / kBlockCols) * kThreads * kEach * kCols numbers.
template <class In, class State, int kRule, bool kNormalise, int K, int V, int kRows, int kCols,
          int kWarps, int kTokens, int kGroup, int kWide>
__global__ void __launch_bounds__(32 * kWarps, 1)
    recurrent_grad(const CallArgs a, const GradArgs g) {
  static_assert(kRows >= 1 && kRows <= 32 && (kRows & (kRows - 1)) == 0, "rows over 2^n lanes");
  static_assert(kTokens % kGroup == 0, "whole groups of tokens");
  static_assert(V % kWide == 0, "no run of v ends past the columns");
  using Map = RowMap<State, K, kRows>;
  using Tile = Part<State, K, kRows, kCols>;
  using Kept = typename Storage<In>::State;
  constexpr int kEach = Map::kEach, kPaddedK = Map::kPadded, kThreads = 32 * kWarps;
  constexpr int kWarpCols = 32 / kRows * kCols, kBlockCols = kWarps * kWarpCols;
  constexpr int kColBlocks = (V + kBlockCols - 1) / kBlockCols, kLaneCols = 32 / kRows;
  constexpr int kSums = (2 * kEach + kLaneCols - 1) / kLaneCols * kLaneCols;
  constexpr int kPartial = kGroup * (2 * kPaddedK + 2);  // of one warp, dq, dk and two scalars
  using Tokens = Slot<State, kPaddedK, kBlockCols, kTokens>;

  DYNAMIC_SHARED(State, shared);  // tokens, sums of two groups, states
  const Tokens slot{shared};
  State* const partials = shared + Tokens::kSize;
  State* const own_states = partials + 2 * kWarps * kPartial + threadIdx.x;
  constexpr int kZeros = Tokens::kSize;
  for (int i = threadIdx.x; i < kZeros; i += kThreads) shared[i] = 0;  // the padding
  __syncthreads();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int lane_row = lane % kRows, warp_col = warp * kWarpCols + lane / kRows * kCols;
  const State scale = static_cast<State>(a.scale);

  for (long long item = blockIdx.x; item < a.N * a.H * kColBlocks; item += gridDim.x) {
    const long long nh = item / kColBlocks, n = nh / a.H, h = nh % a.H;
    const int block = static_cast<int>(item % kColBlocks), col0 = block * kBlockCols;
    const int cols = min(kBlockCols, V - col0);
    const Sequence range = sequence(a, n);
    const long long b = range.b, start = range.start, stop = range.stop;
    const Head<In, State> head(a, g, b, start, h, V, col0);
    const long long segments = (stop - start + kTokens - 1) / kTokens;
    const long long row0 = a.cu_seqlens ? start / kTokens + n : n * ((a.T + kTokens - 1) / kTokens);
    constexpr long long kSaved = static_cast<long long>(kThreads) * Tile::kSize;
    State* const saved = static_cast<State*>(g.states) + (row0 * a.H + h) * kColBlocks * kSaved +
                         block * kSaved + threadIdx.x;
    const long long saved_step = a.H * kColBlocks * kSaved;
    In* const dv = static_cast<In*>(a.y) + b * a.y_stride[0] + h * a.y_stride[2] + col0;

    // Tokens from t0 on into shared memory; those of the way back bring dy, and e from misses.
    const auto fetch = [&](long long t0, bool back) {
      const int tokens = static_cast<int>(min(stop - start - t0, static_cast<long long>(kTokens)));
      fetch_rows<In, State, K, kPaddedK, kWide, kThreads>(slot.k(0), head.k + t0 * a.k_stride[1],
                                                          a.k_stride[1], tokens, K);
      if (back)
        fetch_rows<In, State, K, kPaddedK, kWide, kThreads>(slot.q(0), head.q + t0 * a.q_stride[1],
                                                            a.q_stride[1], tokens, K);
      if (back && head.dy)
        fetch_rows<In, State, kBlockCols, kBlockCols, kWide, kThreads>(
            slot.dy(0), head.dy + t0 * g.dy_stride[1], g.dy_stride[1], tokens, cols);
      if (back && kRule == kDelta)
        fetch_rows<State, State, kBlockCols, kBlockCols, kWide, kThreads>(
            slot.e(0), head.misses + t0 * head.miss_stride, head.miss_stride, tokens, cols);
      else
        fetch_rows<In, State, kBlockCols, kBlockCols, kWide, kThreads>(
            slot.e(0), head.v + t0 * a.v_stride[1], a.v_stride[1], tokens, cols);
      for (int t = threadIdx.x; t < tokens; t += kThreads) {
        Scalar<In> gate, beta;
        gate.load(a.gate, head.gate_at + (t0 + t) * a.gate_stride[1], a.gate_kind);
        beta.load(a.beta, head.beta_at + (t0 + t) * a.beta_stride[1], a.beta_kind);
        slot.gate_beta(t)[0] = gate.template value<State>(a.gate_kind);
        slot.gate_beta(t)[1] = beta.template value<State>(a.beta_kind);
      }
      __syncthreads();
      if (kNormalise) {
        for (int i = warp; i < (back ? 2 : 1) * tokens; i += kWarps) {
          State* const x = i < tokens ? slot.k(i) : slot.q(i - tokens);
          State sum = 0;
          for (int at = lane; at < K; at += 32) sum += x[at] * x[at];
          const State inverse = State(1) / sqrt(sum_rows<32>(sum) + State(1e-6));
          for (int at = lane; at < K; at += 32) x[at] *= inverse;
        }
        __syncthreads();
      }
      return tokens;
    };

    // One token forward, e known.
    const auto advance = [&](Tile& s, int t) {
      State k[kEach], u[kCols];
      Map::read(k, slot.k(t), lane_row);
      const State gate = slot.gate_beta(t)[0], beta = slot.gate_beta(t)[1];
#pragma unroll
      for (int c = 0; c < kCols; c++) u[c] = beta * slot.e(t)[warp_col + c];
      s.step(gate, k, u);
    };

    Tile s;
    s.template load<Kept>(a.initial_state, a.state_stride, n, h, lane_row, warp_col, col0, cols);
    for (long long i = 0; i < segments; i++) {
      const int tokens = fetch(i * kTokens, false);
      s.save(saved + i * saved_step, kThreads);
      for (int t = 0; t < tokens; t++) {
        if (kRule == kDelta) {
          State k[kEach], p[kCols];
          Map::read(k, slot.k(t), lane_row);
          s.times(p, k);
          const State gate = slot.gate_beta(t)[0], beta = slot.gate_beta(t)[1];
          State* const miss = head.misses + (i * kTokens + t) * head.miss_stride + warp_col;
#pragma unroll
          for (int c = 0; c < kCols; c++) {
            const State e = slot.e(t)[warp_col + c] - gate * p[c];
            if (lane_row == 0 && warp_col + c < cols) miss[c] = e;
            p[c] = beta * e;
          }
          s.step(gate, k, p);
        } else {
          advance(s, t);
        }
      }
      __syncthreads();
    }

    Tile d;
    d.template load<Kept>(g.dstate, g.dstate_stride, n, h, lane_row, warp_col, col0, cols);
    int half = 0;
    for (long long i = segments - 1; i >= 0; i--) {
      const int tokens = fetch(i * kTokens, true);
      s.restore(saved + i * saved_step, kThreads);
      for (int t = 0; t < tokens; t++) {
        if (t % kGroup == 0) s.save(own_states + t / kGroup * kThreads * Tile::kSize, kThreads);
        if (t / kGroup < (tokens - 1) / kGroup) advance(s, t);
      }
      for (int t0 = (tokens - 1) / kGroup * kGroup; t0 >= 0; t0 -= kGroup, half ^= 1) {
        State* const partial = partials + (half * kWarps + warp) * kPartial;
        const int count = min(kGroup, tokens - t0);
        for (int in = count - 1; in >= 0; in--) {
          const int t = t0 + in;
          s.restore(own_states + t0 / kGroup * kThreads * Tile::kSize, kThreads);
          for (int j = t0; j < t; j++) advance(s, j);

          State q[kEach], k[kEach], dy[kCols], u[kCols], w[kCols];
          Map::read(q, slot.q(t), lane_row);
          Map::read(k, slot.k(t), lane_row);
          const State gate = slot.gate_beta(t)[0], beta = slot.gate_beta(t)[1];
          State wrote = 0;  // u . dy
#pragma unroll
          for (int c = 0; c < kCols; c++) {
            u[c] = beta * slot.e(t)[warp_col + c];
            dy[c] = scale * slot.dy(t)[warp_col + c];
            wrote += u[c] * dy[c];
          }
          d.step(State(1), q, dy);
          d.times(w, k);
          State scalars[2] = {};
#pragma unroll
          for (int c = 0; c < kCols; c++) {
            if (lane_row == 0) scalars[1] += w[c] * slot.e(t)[warp_col + c];
            w[c] *= beta;
            if (lane_row == 0 && warp_col + c < cols)
              dv[(start + i * kTokens + t) * a.y_stride[1] + warp_col + c] = Narrow<In>::from(w[c]);
          }
          State sums[kSums] = {};  // dq, then dk
#pragma unroll
          for (int r = 0; r < kEach; r++) {
            State of_state = 0, seen = 0, of_d = 0;
#pragma unroll
            for (int c = 0; c < kCols; c++) {
              of_state += s.x[r][c] * dy[c];
              of_d += d.x[r][c] * u[c];
              if (kRule == kDelta) {
                seen += s.x[r][c] * w[c];
                d.x[r][c] -= k[r] * w[c];
              }
              scalars[0] += d.x[r][c] * s.x[r][c];
              d.x[r][c] = exact_product(gate, d.x[r][c]);
            }
            sums[r] = gate * of_state + k[r] * wrote;
            sums[kEach + r] = kRule == kDelta ? of_d - gate * seen : of_d;
          }
          const int first = share_sums<32, kSums, kRows>(sums, lane);
#pragma unroll
          for (int j = 0; j < kSums / kLaneCols; j++) {
            const int at = first + j;
            if (at < 2 * kEach)
              partial[in * 2 * kPaddedK +
                      (at < kEach ? Map::row(lane_row, at)
                                  : kPaddedK + Map::row(lane_row, at - kEach))] = sums[j];
          }
          const int which = share_sums<32, 2>(scalars, lane);
          if (lane < 2) partial[kGroup * 2 * kPaddedK + 2 * in + which] = scalars[0];
        }
        __syncthreads();

        const State* const all = partials + half * kWarps * kPartial;
        const long long at0 =
            ((block * g.B + b) * a.T + start + i * kTokens + t0) * a.H + h;  // of the first token
        for (int e = threadIdx.x; e < count * 2 * (K + 1); e += kThreads) {
          const int in = e / (2 * (K + 1)), x = e % (2 * (K + 1));  // dq, dk, dgate, dbeta
          const int at = x < 2 * K ? in * 2 * kPaddedK + (x < K ? x : kPaddedK + x - K)
                                   : kGroup * 2 * kPaddedK + 2 * in + x - 2 * K;
          State sum = all[at];
          for (int other = 1; other < kWarps; other++) sum += all[other * kPartial + at];
          const long long token = at0 + in * a.H;
          State* const to =
              x < K ? static_cast<State*>(g.partial_dq) + token * K + x
                    : (x < 2 * K ? static_cast<State*>(g.partial_dk) + token * K + x - K
                                 : static_cast<State*>(g.partial_scalars) + 2 * token + x - 2 * K);
          *to = sum;
        }
      }
    }

    if (a.state) {
      Kept* const kept = static_cast<Kept*>(a.state) + nh * K * V + col0;
#pragma unroll
      for (int i = 0; i < kEach; i++)
#pragma unroll
        for (int c = 0; c < kCols; c++) {
          const int row = Map::row(lane_row, i), col = warp_col + c;
          if (row < K && col < cols) kept[row * V + col] = static_cast<Kept>(d.x[i][c]);
        }
    }
    if (a.cu_seqlens && n == a.N - 1)  // tokens after the last sequence belong to none
      for (long long e = threadIdx.x; e < (a.T - stop) * cols; e += kThreads)
        dv[(stop + e / cols) * a.y_stride[1] + e % cols] = Narrow<In>::from(State(0));
  }
}
