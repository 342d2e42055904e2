// What the roles of delta_sm90.cu share, and the one that feeds: copies of q, k, v and y, and
// weights of tokens.
#pragma once
#include "chunk.cuh"
#include "inverse.cuh"
#include "warpgroups.cuh"

constexpr int kDecayWarps = 2, kPreparers = 2, kTables = 3;
constexpr int kMostWarmUp = 32;        // chunks before a piece that are looked at
constexpr float kForgotten = -64;      // as a logarithm to base 2
constexpr float kAllForgotten = -1e4;  // of one chunk; sums of such are finite

struct DeltaPieceArgs {
  float* states;         // (N * H, pieces, column blocks, K of the kernel * 64)
  unsigned* arrivals;    // (N * H, pieces, column blocks), zeros: whether states are there
  long long piece_size;  // tokens, whole chunks
  int pieces, column_blocks;
  int K, V;  // as given; the kernel's own are rounded up to tiles
};

// Of one chunk, in the layout that wgmma reads. Blocks above the diagonal are zeros.
struct alignas(1024) PreparedChunk {
  unsigned short inverse[kTile], scores[kTile];
};

// The bits that follow on those, of a chunk whose keys are much alike: the transposed blocks as
// right factors of mma, one uint4 a lane.
struct alignas(16) Rests {
  uint4 inverse[kLowerBlocks][32], scores[kLowerBlocks][32];
};

// Whether keys are much alike, by rows of blocks.
struct alignas(16) Strain {
  int rows[kBlocks];

  __device__ __forceinline__ bool any() const {
    const int4 x = *reinterpret_cast<const int4*>(rows);
    return x.x | x.y | x.z | x.w;
  }
};

// Decays, and what else weighs tokens. With qk_l2norm a decay from a token on has the factor that
// makes its key a unit, in place of beta.
struct alignas(16) TokenWeights {
  Decay decay;
  float beta[kChunk];
  float row[kChunk];    // of A: beta, times that factor
  float from[kChunk];   // of K S: the decay from the start, times that factor
  float query[kChunk];  // of scores: scale, times the factor of the query
  float out[kChunk];    // of Q S: the decay from the start, times that
};

template <int K>
struct Shape {
  static constexpr int kDim = K, kKeyTiles = K / 64;
  static constexpr int kQuery = kKeyTiles * kTile;  // 16-bit numbers
  static constexpr int kStage = 2 * kQuery + kTile;
  // In all 512 for the four warpgroups.
  static constexpr int kFeedRegisters = K == 64 ? 56 : 64;
  static constexpr int kPrepareRegisters = K == 64 ? 136 : 120;
  static constexpr int kStateRegisters = K == 64 ? 184 : 208;
};

// Everything in shared memory, from a multiple of 1024 bytes on.
template <class S, int kStages>
struct Shared {
  unsigned short stages[kStages][S::kStage];  // q, k, v; y takes the place of v
  PreparedChunk tables[kTables];
  Rests rests[kPreparers];
  Strain strain[kTables];
  TokenWeights weights[kStages];
  GateRing gates;
  float forgotten[kMostWarmUp];  // logarithms of decays of chunks
  unsigned chunks;               // that the block works on
  int warm_chunks;               // of them, before the block's piece
  int grows[2];                  // whether a state may grow in them, or is needed; and after them
  // Of stages and weights: copied, weighed, outputs in place of v, free again.
  Barrier loaded[kStages], weighed[kStages], finished[kStages], free[kStages];
  Barrier prepared[kTables], tables_free[kTables];
};

// What a block works on at a time: columns of a sequence of one head, or of a piece of it.
struct Item {
  int n, b, h, piece, column_block;
  int begin, end;           // of the sequence
  int start, stop, chunks;  // of the piece

  __device__ __forceinline__ Item(const CallArgs& a, const DeltaPieceArgs& cut, int index) {
    const int H = static_cast<int>(a.H), rest = index / cut.column_blocks, nh = rest / cut.pieces;
    column_block = index % cut.column_blocks;
    piece = rest % cut.pieces;
    n = nh / H;
    h = nh % H;
    const Sequence seq = sequence(a, n);
    b = static_cast<int>(seq.b);
    begin = static_cast<int>(seq.start);
    end = static_cast<int>(seq.stop);
    start = static_cast<int>(min(seq.start + piece * cut.piece_size, seq.stop));
    stop = static_cast<int>(min(start + cut.piece_size, seq.stop));
    chunks = (stop - start + kChunk - 1) / kChunk;
  }
  static __device__ __forceinline__ int count(const CallArgs& a, const DeltaPieceArgs& cut) {
    return static_cast<int>(a.N * a.H) * cut.pieces * cut.column_blocks;
  }
};

// The logarithm of what the gates of 64 tokens leave, by one warp.
__device__ __forceinline__ float log_decay(const CallArgs& a, int b, int h, int t, int lane) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    Scalar<bfloat16_t> gate;
    gate.load(a.gate,
              b * a.gate_stride[0] + (t + 2 * lane + i) * a.gate_stride[1] + h * a.gate_stride[2],
              a.gate_kind);
    sum += log2f(fabsf(gate.value<float>(a.gate_kind)));
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum < kAllForgotten ? kAllForgotten : sum;
}

// How many chunks before a piece it begins; -1 if that takes the state of the piece before. By all
// threads, before the roles part.
__device__ __forceinline__ int warm_up(const CallArgs& a, const Item& w,
                                       float (&forgotten)[kMostWarmUp]) {
  const int whole = min((w.start - w.begin) / kChunk, kMostWarmUp), lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < whole; i += blockDim.x / 32) {
    const float log = log_decay(a, w.b, w.h, w.start - (i + 1) * kChunk, lane);
    if (lane == 0) forgotten[i] = log;
  }
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < whole; i++) {
    sum += forgotten[i];
    if (sum < kForgotten) return i + 1;
  }
  return w.start - whole * kChunk == w.begin ? whole : -1;
}

// The feeding warps' view of an item: its chunks from the first one of the warm-up on.
struct Feed {
  const CallArgs& a;
  int b, h, column_block, start, stop;

  __device__ __forceinline__ Feed(const CallArgs& call, const Item& w, int warm_up)
      : a(call),
        b(w.b),
        h(w.h),
        column_block(w.column_block),
        start(w.start - warm_up * kChunk),
        stop(w.stop) {}

  __device__ __forceinline__ void fetch_gates(GateRing& gates, int c, int lane) const {
    const int t = start + c * kChunk;
    gates.fetch(c % GateRing::kSlots, a, b, h, t, stop, lane);
  }
};

// Has the chunks of an item copied, by one thread.
template <class S, int kStages>
__device__ __forceinline__ void load(Shared<S, kStages>& shared, const Feed& w,
                                     Turn<kStages>& stage, const TensorMap& q_map,
                                     const TensorMap& k_map, const TensorMap& v_map) {
  const int hq = w.h / static_cast<int>(w.a.group), col = w.column_block * 64;
#pragma unroll 1
  for (int t = w.start; t < w.stop; t += kChunk, stage.next()) {
    unsigned short* to = shared.stages[stage.slot];
    Barrier& barrier = shared.loaded[stage.slot];
    shared.free[stage.slot].wait(stage.parity ^ 1);
    barrier.arrive_and_expect(2 * S::kStage);
    for (int i = 0; i < S::kKeyTiles; i++, to += kTile)
      load_tile(to, q_map, i * 64, hq, t, w.b, barrier);
    for (int i = 0; i < S::kKeyTiles; i++, to += kTile)
      load_tile(to, k_map, i * 64, hq, t, w.b, barrier);
    load_tile(to, v_map, col, w.h, t, w.b, barrier);
  }
}

// Has the outputs of an item copied back, by one warp. `skip` chunks are of the warm-up.
template <class S, int kStages>
__device__ __forceinline__ void store(Shared<S, kStages>& shared, const Feed& w, int V, int skip,
                                      Turn<kStages>& stage, const TensorMap& y_map, int lane) {
  const int col0 = w.column_block * 64;
#pragma unroll 1
  for (int t = w.start; t < w.stop; t += kChunk, stage.next()) {
    const unsigned short* const tile = shared.stages[stage.slot] + 2 * S::kQuery;
    shared.finished[stage.slot].wait(stage.parity);
    if (--skip >= 0) {
    } else if (t + kChunk <= w.stop || w.stop == w.a.T) {
      if (lane == 0) {
        store_tile(y_map, tile, col0, w.h, t, w.b);
        commit_stores();
        wait_stores_read();
      }
    } else {  // rows of the next sequence follow
      unsigned short* const y = static_cast<unsigned short*>(w.a.y) + w.b * w.a.y_stride[0] +
                                w.h * w.a.y_stride[2] + col0;
#pragma unroll 1
      for (int e = lane; e < kTile; e += 32) {
        const int row = e / 64, col = e % 64;
        if (t + row < w.stop && col0 + col < V)
          y[static_cast<long long>(t + row) * w.a.y_stride[1] + col] =
              tile[swizzled(row, col / 8) + col % 8];
      }
    }
    __syncwarp();
    if (lane == 0) shared.free[stage.slot].arrive();
  }
}

// What makes rows 2 lane and 2 lane + 1 of a chunk's q or k of unit length.
template <int kTiles>
__device__ __forceinline__ float2 unit_factors(const unsigned short* tiles, int lane) {
  float2 sum = {0, 0};
#pragma unroll 1
  for (int i = 0; i < kTiles; i++)
#pragma unroll 2
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const unsigned short* const at = tiles + i * kTile + swizzled(2 * lane + odd, n);
        const uint4 x = *reinterpret_cast<const uint4*>(at);
        const unsigned two[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float low = bfloat16_bits_to_float(two[j] & 0xffff);
          const float high = bfloat16_bits_to_float(two[j] >> 16);
          (odd ? sum.y : sum.x) += low * low + high * high;
        }
      }
  return {rsqrtf(sum.x + 1e-6f), rsqrtf(sum.y + 1e-6f)};
}

// Makes the weights of every other chunk of an item, by one warp; done counts the block's chunks
// before. The first three are under way.
template <class S, bool kNormalise, int kStages>
__device__ __forceinline__ void make_weights(Shared<S, kStages>& shared, const Feed& w,
                                             unsigned done, int turn, int lane) {
  const float scale = static_cast<float>(w.a.scale);
#pragma unroll 1
  for (int c = turn; w.start + c * kChunk < w.stop; c += kDecayWarps) {
    const unsigned stage = (done + c) % kStages, parity = (done + c) / kStages % 2;
    const int left = w.stop - w.start - c * kChunk;
    unsigned short* const q = shared.stages[stage];
    TokenWeights& weights = shared.weights[stage];
    float gate[2], beta[2];
    float2 query = {scale, scale}, key = {1, 1};
    cp_async_wait<2>();
    shared.free[stage].wait(parity ^ 1);
    const bool others = left < kChunk && w.stop < w.a.T;
    if (kNormalise || others) shared.loaded[stage].wait(parity);
    if (others) {  // tokens of the next sequence, which may be NaN
#pragma unroll 1
      for (int i = S::kKeyTiles; i < S::kStage / kTile; i++)
#pragma unroll 1
        for (int e = left * 64 + lane; e < kTile; e += 32) q[i * kTile + e] = 0;
      fence_shared();
      __syncwarp();
    }
    if (kNormalise) {
      const float2 units = unit_factors<S::kKeyTiles>(q, lane);
      query = {scale * units.x, scale * units.y};
      key = unit_factors<S::kKeyTiles>(q + S::kQuery, lane);
    }
    shared.gates.read(gate, beta, c % GateRing::kSlots, w.a, left, lane);
    weights.decay.fill(lane, gate[0], gate[1], key.x, key.y);
    const float2 from = *reinterpret_cast<const float2*>(weights.decay.from_start + 2 * lane);
    const auto put = [&](float* to, float x, float y) {
      *reinterpret_cast<float2*>(to + 2 * lane) = {x, y};
    };
    put(weights.beta, beta[0], beta[1]);
    put(weights.row, beta[0] * key.x, beta[1] * key.y);
    put(weights.from, from.x * key.x, from.y * key.y);
    put(weights.query, query.x, query.y);
    put(weights.out, from.x * query.x, from.y * query.y);
    __syncwarp();
    weights.decay.fill_diagonal(lane);
    __syncwarp();
    if (lane == 0) shared.weighed[stage].arrive();
    w.fetch_gates(shared.gates, c + 3 * kDecayWarps, lane);
  }
}
