// The linear rule in chunks of 64 tokens on tensor cores, for bfloat16:
//
//   Y_i = d_i q_i S + sum_{j <= i} (q_i . k_j) D_ij v_j        S <- d_63 S + sum_j D_63,j k_j v_j^T
//
// with D_ij = beta_j gate_{j+1} ... gate_i and d_i = gate_0 ... gate_i (decay.cuh). Products are of
// bfloat16 numbers, sums and the state are float32.
//
// A block walks through the chunks of one piece of a sequence for kBlockCols columns of V of one
// head. Its warps have roles: four make outputs, each 16 rows of the chunk; kStateWarps keep the
// state and write it, rounded, into shared memory for the next chunk; two make the decays of chunks
// to come; two copy q, k and v, kStages - 1 chunks ahead. One barrier a chunk.
//
// Where heads are too few to fill the chip, sequences are cut into pieces: states of pieces from
// zero (kOutput = false), a scan over pieces (scan_pieces), then outputs of all pieces at once.
#include "chunk.cuh"
#include "linear_tiles.cuh"

constexpr int kDecays = 3;  // of the chunk at hand and of two in the making
constexpr int kPad = 8;  // 16-bit numbers after each row in shared memory: rows in different banks

struct PieceArgs {
  float* states;         // (pieces, N, H, K, V): after each piece from zero, then before each piece
  float* decays;         // (pieces, N, H)
  long long piece_size;  // tokens, whole chunks
  int pieces;
  int padding;
};

template <int K, int V, int kBlockCols, int kStages, bool kOutput>
struct Shape {
  static constexpr int kRows = (K + 15) / 16 * 16, kRowTiles = kRows / 16;  // of the state
  static constexpr int kColBlocks = (V + kBlockCols - 1) / kBlockCols;
  static constexpr int kStateRowWarps = kRowTiles % 4 == 0 ? 4 : (kRowTiles % 2 == 0 ? 2 : 1);
  static constexpr int kMostColWarps = kBlockCols / 16;
  static constexpr int kStateColWarps =
      4 / kStateRowWarps < kMostColWarps ? 4 / kStateRowWarps : kMostColWarps;
  static constexpr int kStateWarps = kStateRowWarps * kStateColWarps;
  static constexpr int kOutWarps = kOutput ? kBlocks : 0;
  static constexpr int kThreads = 32 * (kOutWarps + kStateWarps + 4);
  static constexpr int kKeyRow = kRows + kPad, kValueRow = kBlockCols + kPad;  // 16-bit numbers
  static constexpr int kOutRow = kBlockCols + kPad;
  static constexpr int kQuery = kOutput ? kChunk * kKeyRow : 0;
  static constexpr int kStage = kQuery + kChunk * (kKeyRow + kValueRow);
  static constexpr int kStateSize = kOutput ? kRows * kValueRow : 0;
  static constexpr int kOutSize = kOutput ? kOutWarps * 16 * kOutRow : 0;
  static constexpr int kNumbers = kStages * kStage + 2 * kStateSize + kOutSize;  // of 16 bits
};

// grid: any number of blocks; N * H * pieces * ceil(V / kBlockCols) items are dealt out in turns,
// one piece fewer where only states are made. block: Shape::kThreads. With kWide all rows of q, k,
// v and y begin at multiples of 16 bytes and hold whole vectors of 8.
template <int K, int V, int kBlockCols, int kStages, bool kWide, bool kOutput>
__global__ void __launch_bounds__(Shape<K, V, kBlockCols, kStages, kOutput>::kThreads, 1)
    linear(const CallArgs a, const PieceArgs pieces) {
  using S = Shape<K, V, kBlockCols, kStages, kOutput>;
  static_assert(kBlockCols % 16 == 0, "a warp's columns are pairs of tiles");
  static_assert(!kWide || (K % 8 == 0 && V % 8 == 0), "rows of whole vectors");
  DYNAMIC_SHARED(unsigned short, shared);
  unsigned short* const states = shared + kStages * S::kStage;  // two, by the parity of the chunk
  unsigned short* const outs = states + 2 * S::kStateSize;
  Decay* const decays = reinterpret_cast<Decay*>(shared + S::kNumbers);
  GateRing& gates = *reinterpret_cast<GateRing*>(decays + kDecays);
  for (int i = threadIdx.x; i < S::kNumbers; i += S::kThreads) shared[i] = 0;  // the padding

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int last_piece = pieces.pieces - (kOutput ? 0 : 1);
  const long long NH = a.N * a.H;
  for (long long item = blockIdx.x; item < NH * last_piece * S::kColBlocks; item += gridDim.x) {
    const int col0 = static_cast<int>(item % S::kColBlocks) * kBlockCols;
    const int cols = min(kBlockCols, V - col0);
    const int piece = static_cast<int>(item / S::kColBlocks % last_piece);
    const long long nh = item / S::kColBlocks / last_piece, n = nh / a.H, h = nh % a.H;
    const Sequence seq = sequence(a, n);
    const long long b = seq.b, end = seq.stop;
    const long long start = min(seq.start + piece * pieces.piece_size, end);
    const long long stop = min(start + pieces.piece_size, end);
    const int chunks = static_cast<int>((stop - start + kChunk - 1) / kChunk);
    float* const piece_state = pieces.states + (piece * NH + nh) * (K * V) + col0;
    __syncthreads();  // the padding is there; the item before has been read

    if (warp < S::kOutWarps) {
      unsigned short* const out = outs + warp * kBlock * S::kOutRow;
      unsigned short* const y =
          static_cast<unsigned short*>(a.y) + b * a.y_stride[0] + h * a.y_stride[2] + col0;
      const float scale = static_cast<float>(a.scale);
      for (int c = 0; c < chunks; c++) {
        __syncthreads();
        const unsigned short* const q = shared + c % kStages * S::kStage;
        const unsigned short* const k = q + S::kQuery;
        const unsigned short* const v = k + kChunk * S::kKeyRow;
        OutTiles<S, kBlockCols / 8> tiles;
        const unsigned short* const state = states + c % 2 * S::kStateSize;
        const Decay& decay = decays[c % kDecays];
        if (decay.wild)
          tiles.template make_row<true>(q, k, v, state, decay, warp, lane);
        else
          tiles.template make_row<false>(q, k, v, state, decay, warp, lane);
#pragma unroll
        for (int n8 = 0; n8 < kBlockCols / 8; n8++)
#pragma unroll
          for (int i = 0; i < 2; i++)
            *reinterpret_cast<unsigned*>(out + (lane / 4 + i * 8) * S::kOutRow + n8 * 8 +
                                         lane % 4 * 2) =
                pack_bfloat16(scale * tiles.y[n8][2 * i], scale * tiles.y[n8][2 * i + 1]);
        __syncwarp();
        const long long t0 = start + static_cast<long long>(c) * kChunk + warp * kBlock;
        constexpr int kStep = kWide ? 8 : 1, kSteps = kBlockCols / kStep;
#pragma unroll 2
        for (int e = lane; e < 16 * kSteps; e += 32) {
          const int row = e / kSteps, at = e % kSteps * kStep;
          if (t0 + row < stop && at < cols)
            *reinterpret_cast<Run<unsigned short, kStep>*>(y + (t0 + row) * a.y_stride[1] + at) =
                *reinterpret_cast<const Run<unsigned short, kStep>*>(out + row * S::kOutRow + at);
        }
      }
      if (a.cu_seqlens && n == a.N - 1 && piece == pieces.pieces - 1)  // tokens of no sequence
        for (long long e = threadIdx.x; e < (a.T - end) * cols; e += 32 * S::kOutWarps)
          y[(end + e / cols) * a.y_stride[1] + e % cols] = 0;
    } else if (warp < S::kOutWarps + S::kStateWarps) {
      constexpr int kTilesDown = S::kRowTiles / S::kStateRowWarps;
      constexpr int kTilesAcross = kBlockCols / 8 / S::kStateColWarps;
      const int w = warp - S::kOutWarps;
      const int row0 = w % S::kStateRowWarps * kTilesDown * 16;
      const int own0 = w / S::kStateRowWarps * kTilesAcross * 8;
      StateTiles<S, kTilesDown, kTilesAcross> tiles;
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
      unsigned short* const mine = states + row0 * S::kValueRow + own0;
      if (kOutput) tiles.publish(mine, lane);
      float whole = 1;
      for (int c = 0; c < chunks; c++) {
        __syncthreads();
        const unsigned short* const k = shared + c % kStages * S::kStage + S::kQuery;
        const Decay& decay = decays[c % kDecays];
        if (decay.wild)
          tiles.template advance<true>(k + row0, k + kChunk * S::kKeyRow + own0, decay, lane);
        else
          tiles.template advance<false>(k + row0, k + kChunk * S::kKeyRow + own0, decay, lane);
        if (kOutput) tiles.publish(mine + (c + 1) % 2 * S::kStateSize, lane);
        whole = bounded(whole * decay.whole);
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
    } else if (warp < S::kOutWarps + S::kStateWarps + 2) {
      // Decays of every other chunk: in one step all but the diagonal, in the next the diagonal.
      const int turn = warp - S::kOutWarps - S::kStateWarps;
      const auto fetch = [&](int c) {
        const long long t = start + static_cast<long long>(c) * kChunk;
        gates.fetch(c % GateRing::kSlots, a, b, h, t, stop, lane);
      };
      const auto fill = [&](int c) {
        const long long left = stop - start - static_cast<long long>(c) * kChunk;
        cp_async_wait<1>();
        gates.fill(decays[c % kDecays], c % GateRing::kSlots, a, left, lane);
      };
      fetch(turn);
      fetch(turn + 2);
      fill(turn);
      __syncwarp();
      if (turn == 0) decays[0].fill_diagonal(lane);
      fetch(turn + 4);
      for (int c = 0; c < chunks; c++) {
        __syncthreads();
        if (c % 2 != turn) {
          decays[(c + 1) % kDecays].fill_diagonal(lane);
        } else {
          fill(c + 2);
          fetch(c + 6);
        }
      }
    } else {
      const int half = warp - S::kOutWarps - S::kStateWarps - 2;  // of the rows
      const unsigned short* const q =
          static_cast<const unsigned short*>(a.q) + b * a.q_stride[0] + h / a.group * a.q_stride[2];
      const unsigned short* const k =
          static_cast<const unsigned short*>(a.k) + b * a.k_stride[0] + h / a.group * a.k_stride[2];
      const unsigned short* const v =
          static_cast<const unsigned short*>(a.v) + b * a.v_stride[0] + h * a.v_stride[2] + col0;
      const auto fetch = [&](int c) {
        const long long t = start + static_cast<long long>(c) * kChunk + half * kCopyRows;
        const int rows = static_cast<int>(min(stop - t, static_cast<long long>(kCopyRows)));
        unsigned short* const stage = shared + c % kStages * S::kStage;
        unsigned short* const keys = stage + S::kQuery + half * kCopyRows * S::kKeyRow;
        unsigned short* const values =
            stage + S::kQuery + kChunk * S::kKeyRow + half * kCopyRows * S::kValueRow;
        if (c < chunks) {
          if (kOutput)
            copy_rows<K, S::kKeyRow, kWide>(stage + half * kCopyRows * S::kKeyRow,
                                            q + t * a.q_stride[1], a.q_stride[1], rows, K, lane);
          copy_rows<K, S::kKeyRow, kWide>(keys, k + t * a.k_stride[1], a.k_stride[1], rows, K,
                                          lane);
          copy_rows<kBlockCols, S::kValueRow, kWide>(values, v + t * a.v_stride[1], a.v_stride[1],
                                                     rows, cols, lane);
        }
        cp_async_commit();
      };
#pragma unroll 1
      for (int c = 0; c < kStages - 1; c++) fetch(c);
      for (int c = 0; c < chunks; c++) {
        cp_async_wait<kStages - 2>();
        __syncthreads();
        fetch(c + kStages - 1);
      }
    }
  }
}

// States before each piece from those after each piece: S <- decay S + state, element by element.
__global__ void scan_pieces(const CallArgs a, const PieceArgs pieces, long long K, long long V) {
  const long long NH = a.N * a.H, size = NH * K * V;
  for (long long e = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; e < size;
       e += static_cast<long long>(gridDim.x) * blockDim.x) {
    const long long nh = e / (K * V), row = e / V % K, col = e % V;
    float s = 0;
    if (a.initial_state)
      s = static_cast<const float*>(
          a.initial_state)[nh / a.H * a.state_stride[0] + nh % a.H * a.state_stride[1] +
                           row * a.state_stride[2] + col * a.state_stride[3]];
    for (int p = 0; p < pieces.pieces; p++) {
      float* const at = pieces.states + p * size + e;
      const float own = p + 1 < pieces.pieces ? *at : 0.f;
      *at = s;
      if (p + 1 < pieces.pieces) s = s * pieces.decays[p * NH + nh] + own;
    }
  }
}
