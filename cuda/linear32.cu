// The linear rule in chunks of 32 tokens on tensor cores, for float32 and float16:
//
//   Y_i = d_i q_i S + sum_{j <= i} (q_i . k_j) D_ij v_j        S <- d_31 S + sum_j D_31,j k_j v_j^T
//
// with D_ij = beta_j gate_{j+1} ... gate_i and d_i = gate_0 ... gate_i (decay32.cuh). Products are
// split as factors.cuh says.
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
#include "feed32.cuh"
#include "tf32_tiles.cuh"

__device__ __forceinline__ void store_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = {x, y};
}
__device__ __forceinline__ void store_pair(half_t* to, float x, float y) {
  *reinterpret_cast<unsigned*>(to) = pack_half(x, y);
}

// Outputs by warp `warp` of those that make them: of one chunk in every step.
template <class S>
__device__ __forceinline__ void make_outputs(const CallArgs& a, const Shared<S>& shared, int warp,
                                             int lane) {
  using In = typename S::In;
  const Item& item = shared.item();  // read anew in every step
  const int rest = warp / S::kSteps, part = rest / S::kRowParts;
  const int block = (rest + part) % S::kRowParts, own0 = part * S::kOutCols;
  __syncthreads();
  for (int c = warp % S::kSteps; c < item.chunks + warp % S::kSteps; c += S::kSteps) {
    __syncthreads();
    if (c >= item.chunks) continue;
    OutTiles<In, S::kProducts, S::kKeyTiles, S::kKeyRow, S::kValueRow, S::kOutRows / 16,
             S::kOutCols / 8>
        tiles;
    tiles.make(shared.queries(c), shared.keys(c), shared.values(c), shared.state_before(c), own0,
               shared.decay(c), block, lane);
    const float scale = static_cast<float>(a.scale);
    const int t = c * kChunk + block * kBlock + lane / 4, col = own0 + lane % 4 * 2;
    In* row = static_cast<In*>(a.y) + item.y + t * a.y_stride[1] + col;
#pragma unroll
    for (int i = 0; i < S::kOutRows / 8; i++, row += 8 * a.y_stride[1]) {
      if (t + 8 * i >= item.tokens) continue;
#pragma unroll
      for (int n = 0; n < S::kOutCols / 8; n++) {
        const float y0 = scale * tiles.y[i / 2][n][i % 2 * 2];
        const float y1 = scale * tiles.y[i / 2][n][i % 2 * 2 + 1];
        if (S::kWide > 1) {
          if (col + n * 8 < item.cols) store_pair(row + n * 8, y0, y1);
        } else {
          if (col + n * 8 < item.cols) row[n * 8] = Narrow<In>::from(y0);
          if (col + n * 8 + 1 < item.cols) row[n * 8 + 1] = Narrow<In>::from(y1);
        }
      }
    }
  }
}

// Zeros for tokens of no sequence, by the warps that make outputs.
template <class S>
__device__ __forceinline__ void clear_rest(const CallArgs& a, const Item& item) {
  using In = typename S::In;
  In* const y = static_cast<In*>(a.y) + item.y + item.tokens * a.y_stride[1];
  for (long long e = threadIdx.x; e < (a.T - item.stop) * item.cols; e += 32 * S::kOutWarps)
    y[e / item.cols * a.y_stride[1] + e % item.cols] = In{};
}

// The state, by warp `warp` of those that keep it: a part of it through all chunks.
template <class S>
__device__ __forceinline__ void keep_state(const CallArgs& a, const PieceArgs& pieces,
                                           const Shared<S>& shared, int warp, int lane) {
  const Item& item = shared.item();
  const int row0 = warp % S::kStateRowParts * S::kStateRows;
  const int own0 = warp / S::kStateRowParts * S::kStateCols;
  float* const piece_state = pieces.states + (item.piece * a.N * a.H + item.nh) * (S::K * S::V);
  StateTiles<typename S::In, S::kProducts, S::kKeyRow, S::kValueRow, S::kStateCols / 16,
             S::kStateRows / 8>
      tiles;
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

// grid: N * H * pieces * ceil(V / kCols) blocks, one piece fewer where only states are made.
// block: Shape::kThreads.
template <class In, int K, int V, int kCols, int kSteps, int kStages, int kOutRows, int kOutCols,
          int kStateRows, int kStateCols, int kCopyWarps, int kDecayWarps, int kProducts, int kWide,
          bool kOutput>
__global__ void __launch_bounds__(
    Shape<In, K, V, kCols, kSteps, kStages, kOutRows, kOutCols, kStateRows, kStateCols, kCopyWarps,
          kDecayWarps, kProducts, kWide, kOutput>::kThreads,
    1) linear32(const CallArgs a, const PieceArgs pieces) {
  using S = Shape<In, K, V, kCols, kSteps, kStages, kOutRows, kOutCols, kStateRows, kStateCols,
                  kCopyWarps, kDecayWarps, kProducts, kWide, kOutput>;
  DYNAMIC_SHARED(float, rows);
  const Shared<S> shared{rows};
  if (S::kPadded)  // with zeros, and nothing is ever written over them
    for (int i = threadIdx.x; i < S::kFloats / 4; i += S::kThreads)
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
