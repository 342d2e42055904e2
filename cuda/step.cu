// A few tokens of either rule, the states updated where they lie:
//
//   linear   S = gate * S + beta * k v^T                      y = scale * q S
//   delta    R = gate * S;  S = R + beta * k (v - k^T R)^T    y = scale * q S
//
// A block owns kBlockCols columns of the state of one head of one batch entry, all K rows of them;
// columns never meet in either rule. Each element is read once and written once, kWide neighbours
// at a time: in a warp kLanes lanes lie along a row, the others and the kWarps warps along K. Every
// load of the state is under way before the first is used. Sums over K go over lanes by shuffles
// and over warps through shared memory, one barrier a sum.
#include "call.cuh"
#include "rows.cuh"

// Strides count elements; a state or pool and y may have any.
struct StepArgs {
  const void* q;              // (B, T, Hq, K)
  const void* k;              // (B, T, Hq, K)
  const void* v;              // (B, T, H, V)
  const void* gate;           // (B, T, H)
  const void* beta;           // (B, T, H)
  const void* state_indices;  // (B), or null: entry b has row b
  void* y;                    // (B, T, H, V)
  void* state;                // (P, H, K, V)
  void* states_out;           // (B, T, H, K, V), or null
  long long q_stride[4], k_stride[4], v_stride[4], gate_stride[3], beta_stride[3], y_stride[4];
  long long state_stride[4], out_stride[5], index_stride;
  long long B, T, H, group, P;  // group = H / Hq
  double scale;
  int gate_kind, beta_kind;  // Scalars
  int index_bytes;           // 4 or 8: int32 or int64
  int padding;
};

// Row of the pool that a batch entry owns, -1 for none; indices on the device were checked by
// nobody.
__device__ __forceinline__ long long pool_row(const StepArgs& a, long long b) {
  if (!a.state_indices) return b;
  const long long at = b * a.index_stride;
  const long long row = a.index_bytes == 4 ? static_cast<const int*>(a.state_indices)[at]
                                           : static_cast<const long long*>(a.state_indices)[at];
  return row < 0 || row >= a.P ? -1 : row;
}

// The tokens of a block in shared memory, rows of q and k padded with zeros.
template <class In, class State, bool kNormalise, int K, int kPadded, int kCols, int kWarps>
struct StepTokens {
  static constexpr int kSize = (2 * kPadded + kCols + 2 + 3) / 4 * 4;  // of State, of one token
  static constexpr int kOfK = (kPadded + 31) / 32, kOfV = (kCols + 31) / 32;  // a lane
  State* base;

  __device__ __forceinline__ State* q(long long t) const { return base + t * kSize; }
  __device__ __forceinline__ State* k(long long t) const { return q(t) + kPadded; }
  __device__ __forceinline__ State* v(long long t) const { return q(t) + 2 * kPadded; }
  __device__ __forceinline__ State* gate_beta(long long t) const { return v(t) + kCols; }

  // A warp brings whole tokens, all its loads under way before the first is used.
  __device__ __forceinline__ void fetch(const StepArgs& a, long long b, long long h, int col0,
                                        int cols, int warp, int lane) const {
    const long long hq = h / a.group;
    const In* const q_row = static_cast<const In*>(a.q) + b * a.q_stride[0] + hq * a.q_stride[2];
    const In* const k_row = static_cast<const In*>(a.k) + b * a.k_stride[0] + hq * a.k_stride[2];
    const In* const v_row =
        static_cast<const In*>(a.v) + b * a.v_stride[0] + h * a.v_stride[2] + col0 * a.v_stride[3];
    const long long gate_at = b * a.gate_stride[0] + h * a.gate_stride[2];
    const long long beta_at = b * a.beta_stride[0] + h * a.beta_stride[2];
#pragma unroll 1
    for (long long t = warp; t < a.T; t += kWarps) {
      In q_part[kOfK], k_part[kOfK], v_part[kOfV];
#pragma unroll
      for (int i = 0; i < kOfK; i++) {
        const int e = i * 32 + lane;
        q_part[i] = e < K ? q_row[t * a.q_stride[1] + e * a.q_stride[3]] : In{};
        k_part[i] = e < K ? k_row[t * a.k_stride[1] + e * a.k_stride[3]] : In{};
      }
#pragma unroll
      for (int i = 0; i < kOfV; i++) {
        const int e = i * 32 + lane;
        v_part[i] = e < cols ? v_row[t * a.v_stride[1] + e * a.v_stride[3]] : In{};
      }
      Scalar<In> gate, beta;
      gate.load(a.gate, gate_at + t * a.gate_stride[1], a.gate_kind);
      beta.load(a.beta, beta_at + t * a.beta_stride[1], a.beta_kind);
      put(q(t), q_part, lane);
      put(k(t), k_part, lane);
#pragma unroll
      for (int i = 0; i < kOfV; i++)
        if (i * 32 + lane < kCols) v(t)[i * 32 + lane] = widen<State>(v_part[i]);
      if (lane == 0) {
        gate_beta(t)[0] = gate.template value<State>(a.gate_kind);
        gate_beta(t)[1] = beta.template value<State>(a.beta_kind);
      }
    }
  }

 private:
  static __device__ __forceinline__ void put(State* to, const In (&part)[kOfK], int lane) {
    State factor = 1;
    if (kNormalise) {
      State sum = 0;
#pragma unroll
      for (int i = 0; i < kOfK; i++) sum += widen<State>(part[i]) * widen<State>(part[i]);
      factor = State(1) / sqrt(sum_rows<32>(sum) + State(1e-6));
    }
#pragma unroll
    for (int i = 0; i < kOfK; i++)
      if (i * 32 + lane < kPadded) to[i * 32 + lane] = factor * widen<State>(part[i]);
  }
};

// One thread's part of the state: kEach rows of kWide neighbouring columns.
template <class State, class Kept, class Map, int K, int kWide>
struct StepTile {
  static constexpr int kEach = Map::kEach;
  using Piece = Run<Kept, kWide>;
  State s[kEach][kWide];

  // Rows lie row_stride apart; real is whether this thread has columns of the state at all.
  __device__ __forceinline__ void load(const Kept* first, long long row_stride, int slot,
                                       bool real) {
    Piece piece[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int row = Map::row(slot, i);
      piece[i] =
          real && row < K ? *reinterpret_cast<const Piece*>(first + row * row_stride) : Piece{};
    }
#pragma unroll
    for (int i = 0; i < kEach; i++)
#pragma unroll
      for (int c = 0; c < kWide; c++) s[i][c] = widen<State>(piece[i].x[c]);
  }

  __device__ __forceinline__ void store(Kept* first, long long row_stride, int slot,
                                        bool real) const {
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int row = Map::row(slot, i);
      Piece piece;
#pragma unroll
      for (int c = 0; c < kWide; c++) piece.x[c] = Narrow<Kept>::from(s[i][c]);
      if (real && row < K) *reinterpret_cast<Piece*>(first + row * row_stride) = piece;
    }
  }

  // x^T s over this thread's rows.
  __device__ __forceinline__ void times(State (&sums)[kWide], const State* x_row, int slot) const {
    State x[kEach];
    Map::read(x, x_row, slot);
#pragma unroll
    for (int c = 0; c < kWide; c++) sums[c] = 0;
#pragma unroll
    for (int i = 0; i < kEach; i++)
#pragma unroll
      for (int c = 0; c < kWide; c++) sums[c] += x[i] * s[i][c];
  }

  // s = gate * s + k u^T
  __device__ __forceinline__ void update(State gate, const State* k_row, const State (&u)[kWide],
                                         int slot) {
    State k[kEach];
    Map::read(k, k_row, slot);
#pragma unroll
    for (int i = 0; i < kEach; i++)
#pragma unroll
      for (int c = 0; c < kWide; c++) s[i][c] = gate * s[i][c] + k[i] * u[c];
  }
};

// grid: (x, y) with x * y of at least B * H * ceil(V / kBlockCols), a block each.
// block: 32 * kWarps. Pieces of kWide > 1 columns need them side by side, at addresses that are
// whole multiples of a piece. kResident blocks fit on a multiprocessor at once.
template <class In, class Kept, class State, int kRule, bool kNormalise, int K, int V, int kWide,
          int kLanes, int kWarps, int kResident>
__global__ void __launch_bounds__(32 * kWarps, kResident) step(const StepArgs a) {
  static_assert(kLanes >= 1 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "2^n lanes a row");
  static_assert(V % kWide == 0, "no piece ends past the columns");
  static_assert(sizeof(Kept) * kWide <= 16, "one load a piece");
  constexpr int kThreads = 32 * kWarps, kBlockCols = kLanes * kWide;
  constexpr int kColBlocks = (V + kBlockCols - 1) / kBlockCols;
  constexpr int kHeld = kWide * kLanes > 32 ? kWide * kLanes / 32 : 1;  // sums a lane is left with
  constexpr int kSums = (kWarps * kBlockCols + 3) / 4 * 4;
  using Map = RowMap<State, K, 32 / kLanes * kWarps>;
  using Tokens = StepTokens<In, State, kNormalise, K, Map::kPadded, kBlockCols, kWarps>;

  DYNAMIC_SHARED(State, shared);  // sums of k^T R, of y at even and at odd tokens; the tokens
  State* const predicted = shared;
  State* const outputs = shared + kSums;
  const Tokens tokens{shared + 3 * kSums};

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int piece_col = lane % kLanes * kWide, slot = warp * (32 / kLanes) + lane / kLanes;
  const State scale = static_cast<State>(a.scale);

  // Sums over the rows of a warp, left where all warps can read them.
  const auto gather = [&](State* to, State(&part)[kWide]) {
    const int first = share_sums<32, kWide, kLanes>(part, lane);
    if (lane / kLanes < kWide) {
#pragma unroll
      for (int i = 0; i < kHeld; i++) to[warp * kBlockCols + piece_col + first + i] = part[i];
    }
  };
  const auto total = [](const State* from, int col) {
    State sum = from[col];
#pragma unroll
    for (int w = 1; w < kWarps; w++) sum += from[w * kBlockCols + col];
    return sum;
  };

  const long long item = blockIdx.y * static_cast<long long>(gridDim.x) + blockIdx.x;
  if (item >= a.B * a.H * kColBlocks) return;
  const long long bh = item / kColBlocks, b = bh / a.H, h = bh % a.H;
  const int col0 = static_cast<int>(item % kColBlocks) * kBlockCols;
  const int cols = min(kBlockCols, V - col0);
  In* const y =
      static_cast<In*>(a.y) + b * a.y_stride[0] + h * a.y_stride[2] + col0 * a.y_stride[3];
  const long long row = pool_row(a, b);
  if (row < 0) {
    for (int e = threadIdx.x; e < a.T * cols; e += kThreads)
      y[e / cols * a.y_stride[1] + e % cols * a.y_stride[3]] = Narrow<In>::from(State(0));
    return;
  }
  const bool real = piece_col < cols;
  Kept* const kept = static_cast<Kept*>(a.state) + row * a.state_stride[0] + h * a.state_stride[1] +
                     (col0 + piece_col) * a.state_stride[3];
  StepTile<State, Kept, Map, K, kWide> tile;
  tile.load(kept, a.state_stride[2], slot, real);
  tokens.fetch(a, b, h, col0, cols, warp, lane);
  __syncthreads();

#pragma unroll 1
  for (long long t = 0; t < a.T; t++) {
    const State gate = tokens.gate_beta(t)[0], beta = tokens.gate_beta(t)[1];
    State part[kWide], u[kWide];
    if (kRule == kDelta) {
      tile.times(part, tokens.k(t), slot);
      gather(predicted, part);
      __syncthreads();
    }
#pragma unroll
    for (int c = 0; c < kWide; c++) {
      const State v = tokens.v(t)[piece_col + c];
      u[c] = beta * (kRule == kDelta ? v - gate * total(predicted, piece_col + c) : v);
    }
    tile.update(gate, tokens.k(t), u, slot);
#pragma unroll 1
    for (int to = a.states_out ? 0 : 1; to < (t == a.T - 1 ? 2 : 1); to++) {
      Kept* const out = static_cast<Kept*>(a.states_out) + b * a.out_stride[0] +
                        t * a.out_stride[1] + h * a.out_stride[2] +
                        (col0 + piece_col) * a.out_stride[4];
      tile.store(to ? kept : out, to ? a.state_stride[2] : a.out_stride[3], slot, real);
    }
    tile.times(part, tokens.q(t), slot);
    State* const sums = outputs + t % 2 * kSums;
    gather(sums, part);
    __syncthreads();
    for (int c = threadIdx.x; c < cols; c += kThreads)
      y[t * a.y_stride[1] + c * a.y_stride[3]] = Narrow<In>::from(scale * total(sums, c));
  }
}
