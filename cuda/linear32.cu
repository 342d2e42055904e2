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
// one warp keeps of the state. kStages chunks lie in shared memory or are on their way there.
template <int K, int V, int kCols, int kSteps, int kStages, int kOutRows, int kOutCols,
          int kStateRows, int kStateCols, int kCopyWarps, int kDecayWarps, bool kOutput>
struct Shape {
  static constexpr int kRealCols = kCols < V ? kCols : V;
  static constexpr int kColBlocks = (V + kCols - 1) / kCols;
  static constexpr int kKeyTiles = (K + 15) / 16;
  static constexpr int kKeyRow = (K + 31) / 32 * 32, kValueRow = (kCols + 31) / 32 * 32;
  static constexpr int kRowParts = kChunk / kOutRows;
  static constexpr int kColParts = (kRealCols + kOutCols - 1) / kOutCols;
  static constexpr int kOutWarps = kSteps * kRowParts * kColParts;
  static constexpr int kStateRowParts = (K + kStateRows - 1) / kStateRows;
  static constexpr int kStateColParts = (kRealCols + kStateCols - 1) / kStateCols;
  static constexpr int kStateWarps = kStateRowParts * kStateColParts;
  static constexpr int kStateSlots = 2 * kSteps;
  static constexpr int kStateSize = kStateColParts * kStateCols * kKeyRow;
  static constexpr int kGateSlots = 3 * kSteps;
  static constexpr int kAhead = kStages - (3 * kSteps - 1);  // chunks copied earlier than they must
  static_assert(kOutRows == 16 || kOutRows == 32, "one or two blocks of a chunk");
  static_assert(kOutCols % 8 == 0 && kStateRows % 8 == 0 && kStateCols % 16 == 0, "whole tiles");
  static_assert(kColParts * kOutCols <= kStateColParts * kStateCols, "outputs need states");
  static_assert(kStateColParts * kStateCols <= kValueRow, "values are padded with zeros so far");
  static_assert(kStateRowParts * kStateRows <= kKeyRow, "keys are padded with zeros so far");
  static_assert(kAhead >= 0, "chunks of outputs, states and copies lie side by side");

  static constexpr int kThreads =
      32 * ((kOutput ? kOutWarps : 0) + kStateWarps + kCopyWarps + kDecayWarps);
  static constexpr int kQuery = kOutput ? kChunk * kKeyRow : 0;  // numbers, like the next ones
  static constexpr int kStage = kQuery + kChunk * (kKeyRow + kValueRow);
  static constexpr int kNumbers = kStages * kStage + (kOutput ? kStateSlots * kStateSize : 0);
  static constexpr int kGates = kGateSlots * 2 * kChunk;
};

// Rows of a chunk into shared memory by the copying warps: kCols numbers a row, of which cols are
// real, in vectors of kWide.
template <int kCols, int kRow, int kWide, int kThreads>
__device__ __forceinline__ void copy_rows(float* to, const float* from, long long stride, int rows,
                                          int cols, int thread) {
  constexpr int kVectors = kCols / kWide;
  static_assert(kCols % kWide == 0, "rows of whole vectors");
#pragma unroll 4
  for (int e = thread; e < kChunk * kVectors; e += kThreads) {
    const int row = e / kVectors, at = e % kVectors * kWide;
    const bool real = row < rows && at < cols;
    cp_async<4 * kWide>(to + place<kRow>(row, at), from + (real ? row * stride + at : 0),
                        real ? 4 * kWide : 0);
  }
}

// One gate or beta, in shared memory where it is not absent.
__device__ __forceinline__ double read_scalar(const float* x, int kind) {
  if (kind == kAbsent) return 1;
  return kind == kLogOfInputs || kind == kLogOfFloat ? exp(double(*x)) : double(*x);
}

// grid: N * H * pieces * ceil(V / kCols) blocks, one piece fewer where only states are made. block:
// Shape::threads. All rows of q, k, v and y begin at multiples of 4 kWide bytes and hold whole
// vectors of kWide.
template <int K, int V, int kCols, int kSteps, int kStages, int kOutRows, int kOutCols,
          int kStateRows, int kStateCols, int kCopyWarps, int kDecayWarps, int kProducts, int kWide,
          bool kOutput>
__global__ void __launch_bounds__(
    Shape<K, V, kCols, kSteps, kStages, kOutRows, kOutCols, kStateRows, kStateCols, kCopyWarps,
          kDecayWarps, kOutput>::kThreads,
    1) linear32(const CallArgs a, const PieceArgs pieces) {
  using S = Shape<K, V, kCols, kSteps, kStages, kOutRows, kOutCols, kStateRows, kStateCols,
                  kCopyWarps, kDecayWarps, kOutput>;
  static_assert(kWide == 1 || (kWide == 4 && K % 4 == 0 && V % 4 == 0), "rows of whole vectors");
  constexpr int kThreads = S::kThreads, kStage = S::kStage;
  constexpr int kNumbers = S::kNumbers, kOutWarps = kOutput ? S::kOutWarps : 0;
  DYNAMIC_SHARED(float, shared);
  float* const states = shared + kStages * kStage;
  Decay* const decays = reinterpret_cast<Decay*>(shared + kNumbers);
  float* const gates = reinterpret_cast<float*>(decays + kStages);
  if (K % 32 != 0 || S::kRealCols % 32 != 0)  // the padding is zeros, and nothing is written to it
    for (int i = threadIdx.x; i < kNumbers / 4; i += kThreads)
      reinterpret_cast<Run<float, 4>*>(shared)[i] = {};

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int last_piece = pieces.pieces - (kOutput ? 0 : 1);
  const long long NH = a.N * a.H;
  const long long item = blockIdx.x;
  const int col0 = static_cast<int>(item % S::kColBlocks) * kCols;
  const int cols = min(kCols, V - col0);
  const int piece = static_cast<int>(item / S::kColBlocks % last_piece);
  const long long nh = item / S::kColBlocks / last_piece, n = nh / a.H, h = nh % a.H;
  const Sequence seq = sequence(a, n);
  const long long b = seq.b, end = seq.stop;
  const long long start = min(seq.start + piece * pieces.piece_size, end);
  const long long stop = min(start + pieces.piece_size, end);
  const int chunks = static_cast<int>((stop - start + kChunk - 1) / kChunk);
  const int steps = (chunks + kSteps - 1) / kSteps;
  float* const piece_state = pieces.states + (piece * NH + nh) * (K * V) + col0;
  const auto queries = [=](int c) { return shared + c % kStages * kStage; };
  const auto keys = [=](int c) { return queries(c) + S::kQuery; };
  const auto values = [=](int c) { return keys(c) + kChunk * S::kKeyRow; };
  const auto state_before = [=](int c) { return states + c % S::kStateSlots * S::kStateSize; };
  __syncthreads();  // the padding is there

  if (warp < kOutWarps) {
    const int rest = warp / kSteps, part = rest / S::kRowParts;
    const int block = (rest + part) % S::kRowParts, own0 = part * kOutCols;
    float* const y = static_cast<float*>(a.y) + b * a.y_stride[0] + h * a.y_stride[2] + col0 + own0;
    const float scale = static_cast<float>(a.scale);
    __syncthreads();
    for (int step = 0; step < steps; step++) {
      __syncthreads();
      const int c = step * kSteps + warp % kSteps;
      if (c >= chunks) continue;
      OutTiles<kProducts, S::kKeyTiles, S::kKeyRow, S::kValueRow, kOutRows / 16, kOutCols / 8>
          tiles;
      tiles.make(queries(c), keys(c), values(c), state_before(c), own0, decays[c % kStages], block,
                 lane);
      const long long t0 = start + static_cast<long long>(c) * kChunk + block * kBlock;
#pragma unroll
      for (int m = 0; m < kOutRows / 16; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const long long t = t0 + m * 16 + half * 8 + lane / 4;
          if (t >= stop) continue;
          float* const row = y + t * a.y_stride[1] + lane % 4 * 2;
#pragma unroll
          for (int n8 = 0; n8 < kOutCols / 8; n8++) {
            const int col = own0 + n8 * 8 + lane % 4 * 2;
            const float y0 = scale * tiles.y[m][n8][2 * half];
            const float y1 = scale * tiles.y[m][n8][2 * half + 1];
            if (kWide > 1) {
              if (col < cols) *reinterpret_cast<float2*>(row + n8 * 8) = {y0, y1};
            } else {
              if (col < cols) row[n8 * 8] = y0;
              if (col + 1 < cols) row[n8 * 8 + 1] = y1;
            }
          }
        }
    }
    if (a.cu_seqlens && n == a.N - 1 && piece == pieces.pieces - 1)  // tokens of no sequence
      for (long long e = threadIdx.x; e < (a.T - end) * cols; e += 32 * kOutWarps)
        static_cast<float*>(a.y)[b * a.y_stride[0] + h * a.y_stride[2] + col0 +
                                 (end + e / cols) * a.y_stride[1] + e % cols] = 0;
  } else if (warp < kOutWarps + S::kStateWarps) {
    const int w = warp - kOutWarps;
    const int row0 = w % S::kStateRowParts * kStateRows;
    const int own0 = w / S::kStateRowParts * kStateCols;
    StateTiles<kProducts, S::kKeyRow, S::kValueRow, kStateCols / 16, kStateRows / 8> tiles;
    tiles.clear_carry();
    tiles.each(lane, [&](float& s, int i, int j) {
      const int row = row0 + i, col = own0 + j;
      s = 0;
      if (row >= K || col >= cols) return;
      if (kOutput && pieces.pieces > 1)
        s = piece_state[row * V + col];
      else if (kOutput && a.initial_state)
        s = static_cast<const float*>(
            a.initial_state)[n * a.state_stride[0] + h * a.state_stride[1] +
                             row * a.state_stride[2] + (col0 + col) * a.state_stride[3]];
    });
    double whole = 1;
    const auto advance = [&](int c) {
      if (c >= chunks) return;
      const Decay& decay = decays[c % kStages];
      tiles.advance(keys(c), values(c), row0, own0, decay, lane);
      if (kOutput)
        tiles.publish(state_before(c + 1), row0, own0, lane);
      else
        whole = bounded(whole * (double(decay.whole) + decay.whole_rest));
    };
    if (kOutput) tiles.publish(state_before(0), row0, own0, lane);
    __syncthreads();
#pragma unroll 1
    for (int c = 0; c < kSteps - 1; c++) advance(c);
    for (int step = 0; step < steps; step++) {
      __syncthreads();
#pragma unroll 1
      for (int c = 0; c < kSteps; c++) advance(step * kSteps + kSteps - 1 + c);
    }
    float* kept = nullptr;
    if (!kOutput)
      kept = piece_state;
    else if (a.state && piece == pieces.pieces - 1)
      kept = static_cast<float*>(a.state) + nh * (K * V) + col0;
    if (kept)
      tiles.each(lane, [&](float& s, int i, int j) {
        if (row0 + i < K && own0 + j < cols) kept[(row0 + i) * V + own0 + j] = s;
      });
    if (!kOutput && col0 == 0 && w == 0 && lane == 0) pieces.decays[piece * NH + nh] = whole;
  } else if (warp < kOutWarps + S::kStateWarps + kDecayWarps) {
    // Every so many chunks, one token a lane. Each gate is a read of its own, far from the next
    // one: they are fetched two steps before they are used.
    const int turn = warp - kOutWarps - S::kStateWarps;
    const auto next = [=](int c) {  // of this warp, c or the first one after it
      return c + (turn + kDecayWarps - c % kDecayWarps) % kDecayWarps;
    };
    const auto fetch = [&](int first, int count) {
      for (int c = next(first); c < first + count; c += kDecayWarps) {
        const long long t = start + static_cast<long long>(c) * kChunk + lane;
        float* const to = gates + c % S::kGateSlots * (2 * kChunk) + lane;
        if (t >= stop) continue;
        if (a.gate_kind != kAbsent)
          cp_async<4>(to, static_cast<const float*>(a.gate) + b * a.gate_stride[0] +
                              t * a.gate_stride[1] + h * a.gate_stride[2]);
        if (a.beta_kind != kAbsent)
          cp_async<4>(to + kChunk, static_cast<const float*>(a.beta) + b * a.beta_stride[0] +
                                       t * a.beta_stride[1] + h * a.beta_stride[2]);
      }
      cp_async_commit();
    };
    const auto fill = [&](int first, int count) {
      for (int c = next(first); c < first + count; c += kDecayWarps) {
        const bool real = start + static_cast<long long>(c) * kChunk + lane < stop;
        const float* const from = gates + c % S::kGateSlots * (2 * kChunk) + lane;
        decays[c % kStages].fill(
            lane, real ? read_scalar(from, a.gate_kind) : 1.0,
            real ? static_cast<float>(read_scalar(from + kChunk, a.beta_kind)) : 0.f);
      }
    };
    constexpr int kFirst = 2 * kSteps - 1;  // chunks whose decays are there before the first step
    fetch(0, kFirst);
    fetch(kFirst, kSteps);
    cp_async_wait<1>();
    fill(0, kFirst);
    fetch(kFirst + kSteps, kSteps);
    __syncthreads();
    for (int step = 0; step < steps; step++) {
      __syncthreads();
      const int c = step * kSteps + kFirst;
      cp_async_wait<1>();
      fill(c, kSteps);
      fetch(c + 2 * kSteps, kSteps);
    }
  } else {
    const int thread = threadIdx.x - 32 * (kOutWarps + S::kStateWarps + kDecayWarps);
    constexpr int kCopyThreads = 32 * kCopyWarps;
    const long long hq = h / a.group;
    const float* const q = static_cast<const float*>(a.q) + b * a.q_stride[0] + hq * a.q_stride[2];
    const float* const k = static_cast<const float*>(a.k) + b * a.k_stride[0] + hq * a.k_stride[2];
    const float* const v =
        static_cast<const float*>(a.v) + b * a.v_stride[0] + h * a.v_stride[2] + col0;
    const auto fetch = [&](int c) {
      if (c < chunks) {
        const long long t = start + static_cast<long long>(c) * kChunk;
        const int rows = static_cast<int>(min(stop - t, static_cast<long long>(kChunk)));
        if (kOutput)
          copy_rows<K, S::kKeyRow, kWide, kCopyThreads>(queries(c), q + t * a.q_stride[1],
                                                        a.q_stride[1], rows, K, thread);
        copy_rows<K, S::kKeyRow, kWide, kCopyThreads>(keys(c), k + t * a.k_stride[1], a.k_stride[1],
                                                      rows, K, thread);
        copy_rows<S::kRealCols, S::kValueRow, kWide, kCopyThreads>(
            values(c), v + t * a.v_stride[1], a.v_stride[1], rows, cols, thread);
      }
      cp_async_commit();
    };
    int next = 0;
#pragma unroll 1
    for (; next < 2 * kSteps - 1 + S::kAhead; next++) fetch(next);
    cp_async_wait<S::kAhead>();
    __syncthreads();
    for (int step = 0; step < steps; step++) {
      __syncthreads();
#pragma unroll 1
      for (int i = 0; i < kSteps; i++) fetch(next++);
      cp_async_wait<S::kAhead>();
    }
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
