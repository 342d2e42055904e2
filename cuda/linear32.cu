// The linear rule in chunks of 32 tokens on tensor cores, for float32:
//
//   Y_i = d_i q_i S + sum_{j <= i} (q_i . k_j) D_ij v_j        S <- d_31 S + sum_j D_31,j k_j v_j^T
//
// with D_ij = beta_j gate_{j+1} ... gate_i and d_i = gate_0 ... gate_i (decay32.cuh). Products are
// split as tf32_tiles.cuh says.
//
// A block walks through the chunks of one piece of a sequence for kCols columns of V of one head,
// kSteps chunks at a time and with one barrier each time. Its warps have roles: some make outputs,
// of chunks whose states are known; some keep the state, advance it through the next kSteps chunks
// and write it into shared memory before each; some copy q, k and v; some make the decays of chunks
// to come. A step of the block works on chunks c to c + kSteps - 1 for outputs, from c + kSteps - 1
// on for states, and from c + 2 kSteps - 1 on for decays and copies.
//
// Where heads are too few to fill the chip, sequences are cut into pieces: states of pieces from
// zero (kOutput = false), a scan over pieces (scan_pieces), then outputs of all pieces at once.
#include "call.cuh"
#include "tf32_tiles.cuh"

struct PieceArgs {
  float* states;         // (pieces, N, H, K, V): after each piece from zero, then before each piece
  double* decays;        // (pieces, N, H)
  long long piece_size;  // tokens, whole chunks
  int pieces;
  int padding;
};

// kOutRows and kOutCols: what one warp makes of a chunk's outputs. kStateRows and kStateCols: what
// one warp keeps of the state. kStages chunks lie in shared memory or are on their way there. All
// rows of q, k, v and y begin at multiples of 4 kWide bytes and hold whole vectors of kWide.
template <int K_, int V_, int kCols_, int kSteps_, int kStages_, int kOutRows_, int kOutCols_,
          int kStateRows_, int kStateCols_, int kCopyWarps_, int kDecayWarps_, int kProducts_,
          int kWide_, bool kOutput_>
struct Shape {
  static constexpr int K = K_, V = V_, kCols = kCols_, kSteps = kSteps_, kStages = kStages_;
  static constexpr int kOutRows = kOutRows_, kOutCols = kOutCols_;
  static constexpr int kStateRows = kStateRows_, kStateCols = kStateCols_;
  static constexpr int kCopyWarps = kCopyWarps_, kDecayWarps = kDecayWarps_;
  static constexpr int kProducts = kProducts_, kWide = kWide_;
  static constexpr bool kOutput = kOutput_;

  static constexpr int kRealCols = kCols < V ? kCols : V;
  static constexpr int kColBlocks = (V + kCols - 1) / kCols;
  static constexpr int kKeyTiles = (K + 15) / 16;
  static constexpr int kKeyRow = (K + 31) / 32 * 32, kValueRow = (kCols + 31) / 32 * 32;
  static constexpr int kRowParts = kChunk / kOutRows;
  static constexpr int kColParts = (kRealCols + kOutCols - 1) / kOutCols;
  static constexpr int kOutWarps = kOutput ? kSteps * kRowParts * kColParts : 0;
  static constexpr int kStateRowParts = (K + kStateRows - 1) / kStateRows;
  static constexpr int kStateColParts = (kRealCols + kStateCols - 1) / kStateCols;
  static constexpr int kStateWarps = kStateRowParts * kStateColParts;
  static constexpr int kThreads = 32 * (kOutWarps + kStateWarps + kCopyWarps + kDecayWarps);
  static constexpr int kStateSlots = 2 * kSteps, kGateSlots = 3 * kSteps;
  static constexpr int kStateSize = kStateColParts * kStateCols * kKeyRow;
  static constexpr int kQuery = kOutput ? kChunk * kKeyRow : 0;  // numbers, like the next ones
  static constexpr int kStage = kQuery + kChunk * (kKeyRow + kValueRow);
  static constexpr int kNumbers = kStages * kStage + (kOutput ? kStateSlots * kStateSize : 0);
  static constexpr int kAhead = kStages - (3 * kSteps - 1);  // chunks copied earlier than they must
  static constexpr bool kPadded = K % 32 != 0 || kRealCols % 32 != 0;

  static_assert(kWide == 1 || (kWide == 4 && K % 4 == 0 && V % 4 == 0), "rows of whole vectors");
  static_assert(kOutRows == 16 || kOutRows == 32, "one or two blocks of a chunk");
  static_assert(kOutCols % 8 == 0 && kStateRows % 8 == 0 && kStateCols % 16 == 0, "whole tiles");
  static_assert(kColParts * kOutCols <= kStateColParts * kStateCols, "outputs need states");
  static_assert(kStateColParts * kStateCols <= kValueRow, "values are padded with zeros so far");
  static_assert(kStateRowParts * kStateRows <= kKeyRow, "keys are padded with zeros so far");
  static_assert(kDecayWarps <= kSteps, "each writes gates of its own, whatever the others do");
  static_assert(kAhead >= 0, "chunks of outputs, states and copies lie side by side");
};

// What a block works on.
struct Item {
  long long b, h, n, nh, start, stop;  // the first token of the piece, and one past its last
  long long y;                         // where the first output lies
  int piece, chunks, col0, cols, tokens, padding;
};

// Shared memory of a block. The item lies there too: registers are scarce, and its numbers are
// wanted before and after the chunks.
template <class S>
struct Shared {
  float* rows;

  __device__ __forceinline__ float* queries(int c) const {
    return rows + c % S::kStages * S::kStage;
  }
  __device__ __forceinline__ float* keys(int c) const { return queries(c) + S::kQuery; }
  __device__ __forceinline__ float* values(int c) const { return keys(c) + kChunk * S::kKeyRow; }
  __device__ __forceinline__ float* state_before(int c) const {
    return rows + S::kStages * S::kStage + c % S::kStateSlots * S::kStateSize;
  }
  __device__ __forceinline__ Decay& decay(int c) const {
    return reinterpret_cast<Decay*>(rows + S::kNumbers)[c % S::kStages];
  }
  __device__ __forceinline__ float* gates(int c) const {
    return reinterpret_cast<float*>(reinterpret_cast<Decay*>(rows + S::kNumbers) + S::kStages) +
           c % S::kGateSlots * (2 * kChunk);
  }
  __device__ __forceinline__ Item& item() const {
    return *reinterpret_cast<Item*>(gates(0) + S::kGateSlots * 2 * kChunk);
  }
};

template <class S>
__device__ __forceinline__ Item find_item(const CallArgs& a, const PieceArgs& pieces) {
  Item x;
  const int last_piece = pieces.pieces - (S::kOutput ? 0 : 1);
  const long long item = blockIdx.x;
  x.col0 = static_cast<int>(item % S::kColBlocks) * S::kCols;
  x.cols = min(S::kCols, S::V - x.col0);
  x.piece = static_cast<int>(item / S::kColBlocks % last_piece);
  x.nh = item / S::kColBlocks / last_piece;
  x.n = x.nh / a.H;
  x.h = x.nh % a.H;
  const Sequence seq = sequence(a, x.n);
  x.b = seq.b;
  x.start = min(seq.start + x.piece * pieces.piece_size, seq.stop);
  x.stop = min(x.start + pieces.piece_size, seq.stop);
  x.y = x.b * a.y_stride[0] + x.start * a.y_stride[1] + x.h * a.y_stride[2] + x.col0;
  x.tokens = static_cast<int>(x.stop - x.start);
  x.chunks = (x.tokens + kChunk - 1) / kChunk;
  return x;
}

template <class S>
__device__ __forceinline__ int steps(int chunks) {
  return (chunks + S::kSteps - 1) / S::kSteps;
}

// Outputs by warp `warp` of those that make them: of one chunk in every step.
template <class S>
__device__ __forceinline__ void make_outputs(const CallArgs& a, const Shared<S>& shared, int warp,
                                             int lane) {
  const Item& item = shared.item();  // read anew in every step
  const int rest = warp / S::kSteps, part = rest / S::kRowParts;
  const int block = (rest + part) % S::kRowParts, own0 = part * S::kOutCols;
  __syncthreads();
  for (int c = warp % S::kSteps; c < item.chunks + warp % S::kSteps; c += S::kSteps) {
    __syncthreads();
    if (c >= item.chunks) continue;
    OutTiles<S::kProducts, S::kKeyTiles, S::kKeyRow, S::kValueRow, S::kOutRows / 16,
             S::kOutCols / 8>
        tiles;
    tiles.make(shared.queries(c), shared.keys(c), shared.values(c), shared.state_before(c), own0,
               shared.decay(c), block, lane);
    const float scale = static_cast<float>(a.scale);
    const int t = c * kChunk + block * kBlock + lane / 4, col = own0 + lane % 4 * 2;
    float* row = static_cast<float*>(a.y) + item.y + t * a.y_stride[1] + col;
#pragma unroll
    for (int i = 0; i < S::kOutRows / 8; i++, row += 8 * a.y_stride[1]) {
      if (t + 8 * i >= item.tokens) continue;
#pragma unroll
      for (int n = 0; n < S::kOutCols / 8; n++) {
        const float y0 = scale * tiles.y[i / 2][n][i % 2 * 2];
        const float y1 = scale * tiles.y[i / 2][n][i % 2 * 2 + 1];
        if (S::kWide > 1) {
          if (col + n * 8 < item.cols) *reinterpret_cast<float2*>(row + n * 8) = {y0, y1};
        } else {
          if (col + n * 8 < item.cols) row[n * 8] = y0;
          if (col + n * 8 + 1 < item.cols) row[n * 8 + 1] = y1;
        }
      }
    }
  }
}

// Zeros for tokens of no sequence, by the warps that make outputs.
template <class S>
__device__ __forceinline__ void clear_rest(const CallArgs& a, const Item& item) {
  float* const y = static_cast<float*>(a.y) + item.y + item.tokens * a.y_stride[1];
  for (long long e = threadIdx.x; e < (a.T - item.stop) * item.cols; e += 32 * S::kOutWarps)
    y[e / item.cols * a.y_stride[1] + e % item.cols] = 0;
}

// The state, by warp `warp` of those that keep it: a part of it through all chunks.
template <class S>
__device__ __forceinline__ void keep_state(const CallArgs& a, const PieceArgs& pieces,
                                           const Shared<S>& shared, int warp, int lane) {
  const Item& item = shared.item();
  const int row0 = warp % S::kStateRowParts * S::kStateRows;
  const int own0 = warp / S::kStateRowParts * S::kStateCols;
  float* const piece_state = pieces.states + (item.piece * a.N * a.H + item.nh) * (S::K * S::V);
  StateTiles<S::kProducts, S::kKeyRow, S::kValueRow, S::kStateCols / 16, S::kStateRows / 8> tiles;
  tiles.clear_carry();
  tiles.each(lane, [&](float& s, int i, int j) {
    const long long row = row0 + i, col = item.col0 + own0 + j;
    s = 0;
    if (row >= S::K || own0 + j >= item.cols) return;
    if (S::kOutput && pieces.pieces > 1)
      s = piece_state[row * S::V + col];
    else if (S::kOutput && a.initial_state)
      s = static_cast<const float*>(
          a.initial_state)[item.n * a.state_stride[0] + item.h * a.state_stride[1] +
                           row * a.state_stride[2] + col * a.state_stride[3]];
  });
  const int chunks = item.chunks;
  double whole = 1;
  const auto advance = [&](int c) {
    if (c >= chunks) return;
    const Decay& decay = shared.decay(c);
    tiles.advance(shared.keys(c), shared.values(c), row0, own0, decay, lane);
    if (S::kOutput)
      tiles.publish(shared.state_before(c + 1), row0, own0, lane);
    else
      whole = bounded(whole * (double(decay.whole) + decay.whole_rest));
  };
  if (S::kOutput) tiles.publish(shared.state_before(0), row0, own0, lane);
  __syncthreads();
#pragma unroll 1
  for (int c = 0; c < S::kSteps - 1; c++) advance(c);
  for (int step = 0; step < steps<S>(chunks); step++) {
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < S::kSteps; i++) advance((step + 1) * S::kSteps - 1 + i);
  }
  float* kept = nullptr;
  if (!S::kOutput)
    kept = pieces.states + (item.piece * a.N * a.H + item.nh) * (S::K * S::V);
  else if (a.state && item.piece == pieces.pieces - 1)
    kept = static_cast<float*>(a.state) + item.nh * (S::K * S::V);
  if (kept)
    tiles.each(lane, [&](float& s, int i, int j) {
      if (row0 + i < S::K && own0 + j < item.cols)
        kept[(row0 + i) * S::V + item.col0 + own0 + j] = s;
    });
  if (!S::kOutput && item.col0 == 0 && warp == 0 && lane == 0)
    pieces.decays[item.piece * a.N * a.H + item.nh] = whole;
}

// One gate or beta, in shared memory where it is not absent.
__device__ __forceinline__ double read_scalar(const float* x, int kind) {
  if (kind == kAbsent) return 1;
  return kind == kLogOfInputs || kind == kLogOfFloat ? exp(double(*x)) : double(*x);
}

// Decays by warp `warp` of those that make them: of every so many chunks, one token a lane. Each
// gate is a read of its own, far from the next one: they are fetched two steps before their use.
template <class S>
__device__ __forceinline__ void make_decays(const CallArgs& a, const Shared<S>& shared, int warp,
                                            int lane) {
  const Item& item = shared.item();
  const int tokens = item.tokens, chunks = item.chunks;
  const float* const gate = static_cast<const float*>(a.gate) + item.b * a.gate_stride[0] +
                            item.start * a.gate_stride[1] + item.h * a.gate_stride[2];
  const float* const beta = static_cast<const float*>(a.beta) + item.b * a.beta_stride[0] +
                            item.start * a.beta_stride[1] + item.h * a.beta_stride[2];
  const auto next = [=](int c) {  // of this warp, c or the first one after it
    return c + (warp + S::kDecayWarps - c % S::kDecayWarps) % S::kDecayWarps;
  };
  const auto fetch = [&](int first, int count) {
    for (int c = next(first); c < first + count; c += S::kDecayWarps) {
      const int t = c * kChunk + lane;
      float* const to = shared.gates(c) + lane;
      if (t >= tokens) continue;
      if (a.gate_kind != kAbsent) cp_async<4>(to, gate + t * a.gate_stride[1]);
      if (a.beta_kind != kAbsent) cp_async<4>(to + kChunk, beta + t * a.beta_stride[1]);
    }
    cp_async_commit();
  };
  const auto fill = [&](int first, int count) {
#pragma unroll 1
    for (int c = next(first); c < first + count; c += S::kDecayWarps) {
      const bool real = c * kChunk + lane < tokens;
      const float* const from = shared.gates(c) + lane;
      const double g = real ? read_scalar(from, a.gate_kind) : 1;
      const double b = real ? read_scalar(from + kChunk, a.beta_kind) : 0;
      shared.decay(c).fill(lane, g, static_cast<float>(b));
    }
  };
  constexpr int kFirst = 2 * S::kSteps - 1;  // chunks whose decays are there before the first step
  fetch(0, kFirst);
  fetch(kFirst, S::kSteps);
  cp_async_wait<1>();
  fill(0, kFirst);
  fetch(kFirst + S::kSteps, S::kSteps);
  __syncthreads();
  for (int step = 0; step < steps<S>(chunks); step++) {
    __syncthreads();
    const int c = step * S::kSteps + kFirst;
    cp_async_wait<1>();
    fill(c, S::kSteps);
    fetch(c + 2 * S::kSteps, S::kSteps);
  }
}

// Rows of a chunk into shared memory by the copying warps: kCols numbers a row, of which cols are
// real.
template <class S, int kCols, int kRow>
__device__ __forceinline__ void copy_rows(float* to, const float* from, long long stride, int rows,
                                          int cols, int thread) {
  constexpr int kVectors = kCols / S::kWide, kThreads = 32 * S::kCopyWarps;
  static_assert(kCols % S::kWide == 0, "rows of whole vectors");
#pragma unroll 4
  for (int e = thread; e < kChunk * kVectors; e += kThreads) {
    const int row = e / kVectors, at = e % kVectors * S::kWide;
    const bool real = row < rows && at < cols;
    cp_async<4 * S::kWide>(to + place<kRow>(row, at), from + (real ? row * stride + at : 0),
                           real ? 4 * S::kWide : 0);
  }
}

template <class S>
__device__ __forceinline__ void copy(const CallArgs& a, const Shared<S>& shared, int thread) {
  const Item& item = shared.item();
  const long long hq = item.h / a.group;
  const int tokens = item.tokens, chunks = item.chunks, cols = item.cols;
  const float* q = static_cast<const float*>(a.q) + item.b * a.q_stride[0] + hq * a.q_stride[2] +
                   item.start * a.q_stride[1];
  const float* k = static_cast<const float*>(a.k) + item.b * a.k_stride[0] + hq * a.k_stride[2] +
                   item.start * a.k_stride[1];
  const float* v = static_cast<const float*>(a.v) + item.b * a.v_stride[0] +
                   item.h * a.v_stride[2] + item.start * a.v_stride[1] + item.col0;
  int c = 0;
  const auto fetch_next = [&] {
    if (c < chunks) {
      const int rows = min(tokens - c * kChunk, kChunk);
      if (S::kOutput)
        copy_rows<S, S::K, S::kKeyRow>(shared.queries(c), q, a.q_stride[1], rows, S::K, thread);
      copy_rows<S, S::K, S::kKeyRow>(shared.keys(c), k, a.k_stride[1], rows, S::K, thread);
      copy_rows<S, S::kRealCols, S::kValueRow>(shared.values(c), v, a.v_stride[1], rows, cols,
                                               thread);
      q += kChunk * a.q_stride[1];
      k += kChunk * a.k_stride[1];
      v += kChunk * a.v_stride[1];
    }
    cp_async_commit();
    c++;
  };
#pragma unroll 1
  for (int i = 0; i < 2 * S::kSteps - 1 + S::kAhead; i++) fetch_next();
  cp_async_wait<S::kAhead>();
  __syncthreads();
  for (int step = 0; step < steps<S>(chunks); step++) {
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < S::kSteps; i++) fetch_next();
    cp_async_wait<S::kAhead>();
  }
}

// grid: N * H * pieces * ceil(V / kCols) blocks, one piece fewer where only states are made.
// block: Shape::kThreads.
template <int K, int V, int kCols, int kSteps, int kStages, int kOutRows, int kOutCols,
          int kStateRows, int kStateCols, int kCopyWarps, int kDecayWarps, int kProducts, int kWide,
          bool kOutput>
__global__ void __launch_bounds__(
    Shape<K, V, kCols, kSteps, kStages, kOutRows, kOutCols, kStateRows, kStateCols, kCopyWarps,
          kDecayWarps, kProducts, kWide, kOutput>::kThreads,
    1) linear32(const CallArgs a, const PieceArgs pieces) {
  using S = Shape<K, V, kCols, kSteps, kStages, kOutRows, kOutCols, kStateRows, kStateCols,
                  kCopyWarps, kDecayWarps, kProducts, kWide, kOutput>;
  DYNAMIC_SHARED(float, rows);
  const Shared<S> shared{rows};
  if (S::kPadded)  // with zeros, and nothing is ever written over them
    for (int i = threadIdx.x; i < S::kNumbers / 4; i += S::kThreads)
      reinterpret_cast<Run<float, 4>*>(rows)[i] = {};
  if (threadIdx.x == 0) shared.item() = find_item<S>(a, pieces);
  __syncthreads();  // the padding and the item are there

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp < S::kOutWarps) {
    make_outputs<S>(a, shared, warp, lane);
    const Item& item = shared.item();
    if (a.cu_seqlens && item.n == a.N - 1 && item.piece == pieces.pieces - 1)
      clear_rest<S>(a, item);
  } else if (warp < S::kOutWarps + S::kStateWarps) {
    keep_state<S>(a, pieces, shared, warp - S::kOutWarps, lane);
  } else if (warp < S::kOutWarps + S::kStateWarps + S::kDecayWarps) {
    make_decays<S>(a, shared, warp - S::kOutWarps - S::kStateWarps, lane);
  } else {
    copy<S>(a, shared, threadIdx.x - 32 * (S::kOutWarps + S::kStateWarps + S::kDecayWarps));
  }
}

// States before each piece from those after each piece: S <- decay S + state, element by element.
__global__ void scan_pieces(const CallArgs a, const PieceArgs pieces, long long K, long long V) {
  const long long NH = a.N * a.H, size = NH * K * V;
  for (long long e = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; e < size;
       e += static_cast<long long>(gridDim.x) * blockDim.x) {
    const long long nh = e / (K * V), row = e / V % K, col = e % V;
    double s = 0;
    if (a.initial_state)
      s = static_cast<const float*>(
          a.initial_state)[nh / a.H * a.state_stride[0] + nh % a.H * a.state_stride[1] +
                           row * a.state_stride[2] + col * a.state_stride[3]];
    for (int p = 0; p < pieces.pieces; p++) {
      float* const at = pieces.states + p * size + e;
      const float own = p + 1 < pieces.pieces ? *at : 0.f;
      *at = static_cast<float>(s);
      if (p + 1 < pieces.pieces) s = s * pieces.decays[p * NH + nh] + own;
    }
  }
}
