// A few tokens of either rule, the states updated where they lie:
//
//   linear   u = beta * v                       S' = gate * S + k u^T
//   delta    u = beta * (v - gate * k^T S)      y = scale * q S' = scale * (gate * q S + (q . k) u)
//
// A block owns kBlockCols columns of the state of one head of one batch entry, all K rows of them;
// columns never meet in either rule. Each element is read once and written once, kWide neighbours
// at a time: in a warp kLanes lanes lie along a row, the others and the kWarps warps along K. Every
// load of the state is under way before the first is used. Sums over K go over lanes by shuffles
// and over warps through shared memory, one barrier a token. Of a single token, states of 16 bits
// stay packed in registers until they are used, which leaves room for more loads under way.
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
  static constexpr int kRow = (kPadded + 3) / 4 * 4;
  static constexpr int kSize = (2 * kRow + kCols + 3 + 3) / 4 * 4;  // of State, of one token
  static constexpr int kOfK = (kPadded + 31) / 32, kOfV = (kCols + 31) / 32;  // a lane
  State* base;

  __device__ __forceinline__ State* q(int t) const { return base + t * kSize; }
  __device__ __forceinline__ State* k(int t) const { return q(t) + kRow; }
  __device__ __forceinline__ State* v(int t) const { return k(t) + kRow; }
  // gate, beta, q . k
  __device__ __forceinline__ State* scalars(int t) const { return v(t) + kCols; }

  // Warps from the first on bring q and k of a token each, those from the last back v and the rest;
  // all loads of a token are under way before the first is used.
  __device__ __forceinline__ void fetch(const StepArgs& a, int T, unsigned b, unsigned h, int col0,
                                        int cols, int warp, int lane) const {
#pragma unroll 1
    for (int t = warp; t < T; t += kWarps) fetch_rows(a, t, b, h, lane);
#pragma unroll 1
    for (int t = kWarps - 1 - warp; t < T; t += kWarps) fetch_values(a, t, b, h, col0, cols, lane);
  }

 private:
  __device__ __forceinline__ void fetch_rows(const StepArgs& a, int t, unsigned b, unsigned h,
                                             int lane) const {
    const unsigned hq = h / static_cast<unsigned>(a.group);
    const In* const q_row =
        static_cast<const In*>(a.q) + b * a.q_stride[0] + t * a.q_stride[1] + hq * a.q_stride[2];
    const In* const k_row =
        static_cast<const In*>(a.k) + b * a.k_stride[0] + t * a.k_stride[1] + hq * a.k_stride[2];
    In q_part[kOfK], k_part[kOfK];
#pragma unroll
    for (int i = 0; i < kOfK; i++) {
      const int e = i * 32 + lane;
      q_part[i] = e < K ? q_row[e * a.q_stride[3]] : In{};
      k_part[i] = e < K ? k_row[e * a.k_stride[3]] : In{};
    }
    const State q_factor = put(q(t), q_part, lane), k_factor = put(k(t), k_part, lane);
    State product = 0;
#pragma unroll
    for (int i = 0; i < kOfK; i++) product += widen<State>(q_part[i]) * widen<State>(k_part[i]);
    product = q_factor * k_factor * sum_rows<32>(product);
    if (lane == 0) scalars(t)[2] = product;
  }

  __device__ __forceinline__ void fetch_values(const StepArgs& a, int t, unsigned b, unsigned h,
                                               int col0, int cols, int lane) const {
    const In* const v_row = static_cast<const In*>(a.v) + b * a.v_stride[0] + t * a.v_stride[1] +
                            h * a.v_stride[2] + col0 * a.v_stride[3];
    In v_part[kOfV];
#pragma unroll
    for (int i = 0; i < kOfV; i++) {
      const int e = i * 32 + lane;
      v_part[i] = e < cols ? v_row[e * a.v_stride[3]] : In{};
    }
    Scalar<In> gate, beta;
    gate.load(a.gate, b * a.gate_stride[0] + t * a.gate_stride[1] + h * a.gate_stride[2],
              a.gate_kind);
    beta.load(a.beta, b * a.beta_stride[0] + t * a.beta_stride[1] + h * a.beta_stride[2],
              a.beta_kind);
#pragma unroll
    for (int i = 0; i < kOfV; i++)
      if (i * 32 + lane < kCols) v(t)[i * 32 + lane] = widen<State>(v_part[i]);
    if (lane == 0) {
      scalars(t)[0] = gate.template value<State>(a.gate_kind);
      scalars(t)[1] = beta.template value<State>(a.beta_kind);
    }
  }

  // Returns what the row was multiplied by.
  static __device__ __forceinline__ State put(State* to, const In (&part)[kOfK], int lane) {
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
    return factor;
  }
};

// n neighbours in shared memory, the first at a whole multiple of n.
template <int n, class T>
__device__ __forceinline__ void read_run(T (&x)[n], const T* from) {
  constexpr int kVector = n < 16 / int(sizeof(T)) ? n : 16 / int(sizeof(T));
#pragma unroll
  for (int i = 0; i < n; i += kVector) {
    const auto run = *reinterpret_cast<const Run<T, kVector>*>(from + i);
#pragma unroll
    for (int j = 0; j < kVector; j++) x[i + j] = run.x[j];
  }
}

// Sums of kWarps warps, kStride apart, in a tree that goes on where that over lanes ends: the
// result depends on how many threads share a column, not on how many of them are in one warp.
template <int kWarps, int kStride, int n, class T>
__device__ __forceinline__ void sum_warps(T (&x)[n], const T* from) {
  static_assert(kWarps <= 8, "two halves of at most 4");
  if constexpr (kWarps == 1) {
    read_run(x, from);
  } else {
    constexpr int kFirst = kWarps > 4 ? 4 : (kWarps > 2 ? 2 : 1);  // 2^n
    T more[n];
    sum_warps<kFirst, kStride>(x, from);
    sum_warps<kWarps - kFirst, kStride>(more, from + kFirst * kStride);
#pragma unroll
    for (int i = 0; i < n; i++) x[i] += more[i];
  }
}

// One thread's part of the state, kEach rows of kWide neighbouring columns, in numbers of type
// Held: Kept as it is loaded, between its load and its store State or Kept.
template <class State, class Held, class Map, int K, int kWide>
struct StepTile {
  static constexpr int kEach = Map::kEach;
  using Piece = Packed<Held, kWide>;
  Piece s[kEach];

  static __device__ __forceinline__ bool has(int i, int slot, bool real) {
    return real && (Map::kPadded == K || Map::row(slot, i) < K);
  }

  __device__ __forceinline__ void load(const Held* first, long long row_stride, int slot,
                                       bool real) {
#pragma unroll
    for (int i = 0; i < kEach; i++)
      s[i] = has(i, slot, real)
                 ? *reinterpret_cast<const Piece*>(first + Map::row(0, i) * row_stride)
                 : Piece{};
  }

  __device__ __forceinline__ void take(const StepTile& from) { *this = from; }
  template <class Kept>
  __device__ __forceinline__ void take(const StepTile<State, Kept, Map, K, kWide>& from) {
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      State x[kWide];
      from.s[i].read(x);
      s[i].write(x);
    }
  }

  template <class Kept>
  __device__ __forceinline__ void store(Kept* first, long long row_stride, int slot,
                                        bool real) const {
    StepTile<State, Kept, Map, K, kWide> to;
    to.take(*this);
#pragma unroll
    for (int i = 0; i < kEach; i++)
      if (has(i, slot, real))
        *reinterpret_cast<Packed<Kept, kWide>*>(first + Map::row(0, i) * row_stride) = to.s[i];
  }

  // work(x, k, q) on every row x of this thread and its numbers of k and q; where kWrite, what work
  // leaves in x is kept.
  template <bool kWrite, class Work>
  __device__ __forceinline__ void walk(const State* k_row, const State* q_row, int slot,
                                       Work work) {
#pragma unroll
    for (int first = 0; first < kEach; first += Map::kRun) {
      State k[Map::kRun], q[Map::kRun];
      read_run(k, k_row + Map::row(slot, first));
      read_run(q, q_row + Map::row(slot, first));
#pragma unroll
      for (int i = 0; i < Map::kRun; i++) {
        State x[kWide];
        if (kWrite)
          s[first + i].read(x);
        else
          s[first + i].peek(x);
        work(x, k[i], q[i]);
        if (kWrite) s[first + i].write(x);
      }
    }
  }
};

// Blocks at once where kResident fit on a multiprocessor of 2048 threads: 8.6, 8.9 and 12.x have
// 1536, and less to wait for.
__host__ __device__ constexpr int resident(int kResident) {
#if defined(__CUDA_ARCH__) && \
    (__CUDA_ARCH__ >= 1200 || __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890)
  return kResident > 1 ? kResident * 3 / 4 : 1;
#else
  return kResident;
#endif
}

// grid: (H * ceil(V / kBlockCols), y, z) with y * z of at least B.
// block: 32 * kWarps. Pieces of kWide > 1 columns need them side by side, at addresses that are
// whole multiples of a piece. Held is State, or with T = 1 may be Kept.
template <class In, class Kept, class Held, class State, int kRule, bool kNormalise, int K, int V,
          int kWide, int kLanes, int kWarps, int kResident>
__global__ void __launch_bounds__(32 * kWarps, resident(kResident)) step(const StepArgs a) {
  static_assert(kLanes >= 1 && kLanes <= 32 && (kLanes & (kLanes - 1)) == 0, "2^n lanes a row");
  static_assert(V % kWide == 0, "no piece ends past the columns");
  static_assert(sizeof(Kept) * kWide <= 16, "one load a piece");
  static_assert(sizeof(Held) == sizeof(Kept) || sizeof(Held) == sizeof(State), "one of the two");
  constexpr int kThreads = 32 * kWarps, kBlockCols = kLanes * kWide;
  constexpr int kColBlocks = (V + kBlockCols - 1) / kBlockCols;
  constexpr int kOwn = (kRule == kDelta ? 2 : 1) * kWide;             // sums of a thread
  constexpr int kHeld = kOwn * kLanes > 32 ? kOwn * kLanes / 32 : 1;  // and after sharing
  constexpr int kRowSums = kOwn * kLanes;  // of a warp: q S, then for the delta rule k^T S
  constexpr int kSums = (kWarps * kRowSums + 3) / 4 * 4;
  using Map = RowMap<State, K, 32 / kLanes * kWarps>;
  using Tokens = StepTokens<In, State, kNormalise, K, Map::kPadded, kBlockCols, kWarps>;

  DYNAMIC_SHARED(State, shared);  // sums of even and of odd tokens, then the tokens
  const Tokens tokens{shared + 2 * kSums};

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int piece_col = lane % kLanes * kWide, slot = warp * (32 / kLanes) + lane / kLanes;
  const State scale = static_cast<State>(a.scale);
  const int T = sizeof(Held) < sizeof(State) ? 1 : a.T;

  // Sums over the rows of a warp, left where all warps can read them.
  const auto gather = [&](State* to, State(&part)[kOwn]) {
    const int first = share_sums<32, kOwn, kLanes>(part, lane);
    to += warp * kRowSums + first / kWide * kBlockCols + piece_col + first % kWide;
    if (lane / kLanes < kOwn) {
#pragma unroll
      for (int i = 0; i < kHeld; i++) to[i / kWide * kBlockCols + i % kWide] = part[i];
    }
  };
  const auto total = [](const State* from) {
    State sum[1];
    sum_warps<kWarps, kRowSums>(sum, from);
    return sum[0];
  };

  const unsigned b = blockIdx.z * gridDim.y + blockIdx.y;
  if (b >= a.B) return;
  const unsigned h = blockIdx.x / kColBlocks;
  const int col0 = blockIdx.x % kColBlocks * kBlockCols, cols = min(kBlockCols, V - col0);
  const auto put_y = [&](int t, int col, State value) {
    static_cast<In*>(a.y)[b * a.y_stride[0] + t * a.y_stride[1] + h * a.y_stride[2] +
                          (col0 + col) * a.y_stride[3]] = Narrow<In>::from(value);
  };
  const long long row = pool_row(a, b);
  if (row < 0) {
    for (int e = threadIdx.x; e < T * cols; e += kThreads) put_y(e / cols, e % cols, 0);
    return;
  }
  const bool real = V % kBlockCols == 0 || piece_col < cols;
  const int first_row = Map::row(slot, 0), first_col = col0 + piece_col;
  Kept* const kept = static_cast<Kept*>(a.state) + row * a.state_stride[0] + h * a.state_stride[1] +
                     first_row * a.state_stride[2] + first_col * a.state_stride[3];
  StepTile<State, Kept, Map, K, kWide> loaded;
  loaded.load(kept, a.state_stride[2], slot, real);
  tokens.fetch(a, T, b, h, col0, cols, warp, lane);
  __syncthreads();
  StepTile<State, Held, Map, K, kWide> tile;
  tile.take(loaded);

#pragma unroll 1
  for (int t = 0; t < T; t++) {
    const State gate = tokens.scalars(t)[0], beta = tokens.scalars(t)[1];
    State* const sums = shared + t % 2 * kSums;
    State part[kOwn]{}, u[kWide];
    const auto look = [&](const State(&x)[kWide], State k_row, State q_row) {
#pragma unroll
      for (int c = 0; c < kWide; c++) {
        part[c] += q_row * x[c];
        if constexpr (kRule == kDelta) part[kWide + c] += k_row * x[c];
      }
    };
    tile.template walk<false>(tokens.k(t), tokens.q(t), slot, look);
    gather(sums, part);
    __syncthreads();
    read_run(u, tokens.v(t) + piece_col);
    if constexpr (kRule == kDelta) {
      State predicted[kWide];
      sum_warps<kWarps, kRowSums>(predicted, sums + kBlockCols + piece_col);
#pragma unroll
      for (int c = 0; c < kWide; c++) u[c] -= gate * predicted[c];
    }
#pragma unroll
    for (int c = 0; c < kWide; c++) u[c] *= beta;
    const auto update = [&](State(&x)[kWide], State k_row, State) {
#pragma unroll
      for (int c = 0; c < kWide; c++) x[c] = gate * x[c] + k_row * u[c];
    };
    tile.template walk<true>(tokens.k(t), tokens.q(t), slot, update);
#pragma unroll 1
    for (int to = a.states_out ? 0 : 1; to < (t == T - 1 ? 2 : 1); to++) {
      Kept* const out = static_cast<Kept*>(a.states_out) + b * a.out_stride[0] +
                        t * a.out_stride[1] + h * a.out_stride[2] + first_row * a.out_stride[3] +
                        first_col * a.out_stride[4];
      tile.store(to ? kept : out, to ? a.state_stride[2] : a.out_stride[3], slot, real);
    }
    for (int c = threadIdx.x; c < cols; c += kThreads) {
      State written = tokens.v(t)[c];
      if (kRule == kDelta) written -= gate * total(sums + kBlockCols + c);
      const State sum = gate * total(sums + c) + tokens.scalars(t)[2] * (beta * written);
      put_y(t, c, scale * sum);
    }
  }
}
