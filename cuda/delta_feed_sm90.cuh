// What the roles of delta_sm90.cu share: their memory, places in sequences, and copies of q and k.
#pragma once
#include "arrive.cuh"
#include "call.cuh"
#include "inverse.cuh"
#include "longest_first.cuh"
#include "warpgroups.cuh"

constexpr int kMostWarmUp = 32;                 // chunks before a piece that are looked at
constexpr float kForgotten = -24;               // as a logarithm to base 2
constexpr float kNegligible = 1.f / (1 << 16);  // beside a state, for outputs of 8 bits
constexpr float kAllForgotten = -1e4;           // of one chunk; sums of such are finite
static_assert(kAsInputs == 1 && kLogOfInputs == 3, "odd kinds are stored as inputs are");
constexpr int kDealt = 16;  // items of a queue that are remembered: more than roles are apart
constexpr int kLevels = 6;  // runs of 1, 2, 4, 8, 16 and 32 tokens

struct DeltaPieceArgs {
  float* states;         // (2, N * H, pieces, column blocks, keepers, K of the kernel * 64)
  unsigned* arrivals;    // (N * H, pieces, column blocks, keepers), zeros: states that are there;
                         // or one, 0: of those who took from a queue
  long long piece_size;  // tokens, whole chunks
  int pieces, column_blocks;
  int K, V;       // as given; the kernel's own are rounded up to tiles
  unsigned zero;  // 0, which the compiler must not know: see after
  int padding;
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

// A block of A itself, transposed, in place of the inverse and of its rests, where keys are so much
// alike that an inverse of 16 bits would not do.
__device__ __forceinline__ float* exact_block(PreparedChunk& chunk, Rests& rests, int r, int c) {
  constexpr int kSize = kBlock * kBlock, kFirst = kTile / 2 / kSize;
  const int n = r * (r + 1) / 2 + c;
  return n < kFirst ? reinterpret_cast<float*>(chunk.inverse) + n * kSize
                    : reinterpret_cast<float*>(rests.inverse) + (n - kFirst) * kSize;
}

constexpr int kMuchAlike = 1, kNearlySame = 2;  // keys of a row of blocks, or bits of both

// How much keys are alike, by rows of blocks.
struct alignas(16) Strain {
  int rows[kBlocks];

  __device__ __forceinline__ int any() const {
    const int4 x = *reinterpret_cast<const int4*>(rows);
    return x.x | x.y | x.z | x.w;
  }
};

// What weighs products of tokens inside a chunk, by runs of n = 1, 2, 4 ... 32 tokens that begin at
// multiples of n: D_ij is in[n][i] to_end[n][j] for j < i of neighbouring runs, n the highest bit
// that i and j differ in. Products of neighbouring gates and nothing else.
struct alignas(16) TokenDecays {
  float gate[kChunk], beta[kChunk];
  float in[kLevels][kChunk];      // gates from the start of a token's run to its own
  float to_end[kLevels][kChunk];  // later gates of its run, times what makes its key a unit
  float row[kChunk];              // of A: beta, times that factor
  float query[kChunk];            // of scores: scale, times the factor of the query
};

// What weighs tokens where a state is read and written. With qk_l2norm a decay from a token on has
// the factor that makes its key a unit.
struct alignas(16) TokenWeights {
  float beta[kChunk];
  float from[kChunk];    // of K S: the decay from the start, times that factor
  float out[kChunk];     // of Q S: the decay from the start, times that of the query and scale
  float to_end[kChunk];  // of writes: the decay to the end, times that factor
  float whole;           // all gates
  int wild;              // whether products of them may overflow
};

template <int K>
struct Shape {
  static constexpr int kDim = K, kKeyTiles = K / 64;
  static constexpr int kKeepers = K / 64, kPreparers = 4 - kKeepers;  // warpgroups
  static constexpr int kThreads = (kKeepers + kPreparers) * kGroup;
  static constexpr int kWeights = K == 64 ? 8 : 5;
  static constexpr int kRests = K == 64 ? kPreparers : 1;  // of chunks: memory has no room for more
  static constexpr int kColumns = 64 * kKeepers;           // of V
  static constexpr int kQuery = kKeyTiles * kTile;         // 16-bit numbers
  static constexpr int kStage = 2 * kQuery + kKeepers * kTile;
  // Of a thread: at first, and by roles, in all no more.
  static constexpr int kRegisters = 128, kStateRegisters = 176;
  static constexpr int kPrepareRegisters = K == 64 ? 112 : 80;
};

// Where a warp is: at a chunk of an item.
struct alignas(16) Cursor {
  int index;                 // of the item; -1 past the last one
  int chunk, chunks, start;  // the first token
  int stop, b, h, hq, column_block;
  int ordinal;  // of the block's items, where those come from a queue
  int padding[2];
  long long gates, betas;  // addresses of the first ones of the batch entry and head

  __device__ __forceinline__ int token() const { return start + chunk * kChunk; }
};

// Where values of a stage come from, and where its outputs belong.
struct alignas(16) Place {
  int token, h, b, column_block;
  int open;  // whether outputs have to be stored
  int padding[3];
};

// Tensor maps.
struct Maps {
  const TensorMap &q, &k, &v, &y;
};

// Everything in shared memory, from a multiple of 1024 bytes on.
template <class S, int kStages>
struct Shared {
  static_assert(S::kWeights >= kStages + S::kPreparers, "weights are made one turn ahead");
  unsigned short stages[kStages][S::kStage];  // q, k, v; y takes the place of v
  PreparedChunk tables[kStages];
  Rests rests[S::kRests];
  TokenDecays decays[S::kPreparers];
  TokenWeights weights[S::kWeights];
  Strain strain[kStages];
  Place places[kStages];
  Cursor cursors[4 * S::kPreparers + S::kKeepers];
  float forgotten[2][kMostWarmUp];         // logarithms of decays of chunks
  float left_out[S::kKeepers][2][kGroup];  // sums of two columns of a state at chunk `look`
  int warm_chunks;                         // before the block's piece
  int grows[2];               // whether a state may grow in them, or is needed; and after them
  int look;                   // the chunk that the next piece begins with; -1: nothing is left out
  float left;                 // the logarithm of what gates leave until the next piece
  int doubtful[S::kKeepers];  // whether that is too much
  int again;  // 0, or 1 if the piece is gone through once more, 2 if the one before is as well
  int found;  // the same, before all know it
  int done;   // chunks before that
  // Of stages: q and k copied, v copied, prepared, outputs made.
  Barrier loaded[kStages], values[kStages], prepared[kStages], free[kStages];
  // Of a queue: where it stands, the items that the block has taken from it, which ones, by turns,
  // -1 behind the last, and when each is known.
  QueueState queue;
  int claimed, padding;
  int items[kDealt];
  Barrier dealt[kDealt];
};

// By all threads, at the end of a piece. Whether the roles go through it once more, which then
// begins with the state of the piece before.
template <class S, int kStages>
__device__ __forceinline__ bool once_more(Shared<S, kStages>& shared) {
  constexpr int kAll = S::kPreparers + S::kKeepers + 1;
  sync_threads<S::kThreads>(kAll);
  const int again = shared.found;
  if (again == 0) return false;
  if (threadIdx.x == 0) shared.again = again, shared.warm_chunks = 0, shared.grows[0] = 1;
  sync_threads<S::kThreads>(kAll);
  return true;
}

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

// Where a piece begins, so many chunks early; -1 if it takes the state of the piece before.
struct Beginning {
  int chunks;
  float left;  // the logarithm of what gates leave of earlier tokens; 0 where there are none

  // From what gates leave of `known` chunks before the piece. Whether that was enough.
  __device__ __forceinline__ bool find(const Item& w, const DeltaPieceArgs& cut, int known,
                                       const float (&forgotten)[kMostWarmUp]) {
    const int most = min(kMostWarmUp, static_cast<int>(cut.piece_size) / kChunk);
    const bool all = w.piece == 1 && most * kChunk >= w.start - w.begin;
    chunks = all ? (w.start - w.begin) / kChunk : -1, left = 0;
    float sum = 0;
    for (int i = 0; i < min(known, most); i++) {
      sum += forgotten[i];
      if (sum >= kForgotten) continue;
      chunks = i + 1;
      if (w.start - chunks * kChunk > w.begin) left = sum;
      return true;
    }
    return known >= most;
  }
};

// Of the piece of an item, and of the one after it. By all threads, before the roles part.
__device__ __forceinline__ void find_beginnings(Beginning (&found)[2], const CallArgs& a,
                                                const DeltaPieceArgs& cut, int index,
                                                float (&forgotten)[2][kMostWarmUp]) {
  const Item own(a, cut, index);
  const Item after(a, cut, own.piece < cut.pieces - 1 ? index + cut.column_blocks : index);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, each = blockDim.x / 64;
  const int start = warp % 2 ? after.start : own.start;
  bool enough = false;
  for (int known = 0; !enough; known += each) {
    const int i = known + warp / 2, t = start - (i + 1) * kChunk;
    if (i < kMostWarmUp && t >= own.begin) {
      const float log = log_decay(a, own.b, own.h, t, lane);
      if (lane == 0) forgotten[warp % 2][i] = log;
    } else if (i < kMostWarmUp && lane == 0) {
      forgotten[warp % 2][i] = 0;
    }
    __syncthreads();
    enough = own.piece == 0 || found[0].find(own, cut, known + each, forgotten[0]);
    enough &= found[1].find(after, cut, known + each, forgotten[1]);
  }
  if (own.piece == 0) found[0] = {0, 0};
  if (own.piece == cut.pieces - 1) found[1] = {0, 0};
}

__device__ __forceinline__ int stored_bytes(int kind) { return kind % 2 ? 2 : 4; }
__device__ __forceinline__ long long head_address(const void* base, const long long (&stride)[3],
                                                  int kind, int b, int h) {
  return reinterpret_cast<long long>(base) + (b * stride[0] + h * stride[2]) * stored_bytes(kind);
}

// The chunk `ahead` of the first one of a block, and those so many further on. `warm` chunks are
// before the block's piece.
__device__ __forceinline__ void open(Cursor& at, const CallArgs& a, const DeltaPieceArgs& cut,
                                     int warm) {
  if (at.index >= Item::count(a, cut)) {
    at.index = -1;
    return;
  }
  const Item w(a, cut, at.index);
  at.chunks = w.chunks + warm, at.start = w.start - warm * kChunk, at.stop = w.stop;
  at.gates = head_address(a.gate, a.gate_stride, a.gate_kind, w.b, w.h);
  at.betas = head_address(a.beta, a.beta_stride, a.beta_kind, w.b, w.h);
  at.b = w.b, at.h = w.h, at.hq = w.h / static_cast<int>(a.group), at.column_block = w.column_block;
}
__device__ __forceinline__ void advance(Cursor& at, const CallArgs& a, const DeltaPieceArgs& cut,
                                        int warm, int chunks) {
  at.chunk += chunks;
#pragma unroll 1
  while (at.index >= 0 && at.chunk >= at.chunks) {
    at.chunk -= at.chunks, at.index += gridDim.x;
    open(at, a, cut, warm);
  }
}
__device__ __forceinline__ void set_cursor(Cursor& at, const CallArgs& a, const DeltaPieceArgs& cut,
                                           int warm, int ahead) {
  at.index = block_index(), at.chunk = ahead;
#pragma unroll 1
  for (;; at.chunk -= at.chunks, at.index += gridDim.x) {
    open(at, a, cut, warm);
    if (at.index < 0 || at.chunk < at.chunks) break;
  }
}

// By all threads, before the roles part.
template <class S, int kStages>
__device__ __forceinline__ void begin_queue(Shared<S, kStages>& shared, const CallArgs& a,
                                            const DeltaPieceArgs& cut, int lane) {
  if (threadIdx.x / 32 > 0) return;
  Queue queue(a, static_cast<unsigned>(a.H) * cut.column_blocks, false, lane);
  queue.begin();
  queue.leave(shared.queue);
  if (lane > 0) return;
  shared.claimed = 0;
  for (Barrier& dealt : shared.dealt) init_for_warps(dealt, 1);
  for (int i = 0; i < S::kKeepers; i++) {  // as if they had done with one
    Cursor& keeper = shared.cursors[4 * S::kPreparers + i];
    keeper.ordinal = -1, keeper.chunks = 1;
  }
}
// An item of those that a block takes from a queue, once it is known.
template <class S, int kStages>
__device__ __forceinline__ int item_from_queue(Shared<S, kStages>& shared, unsigned ordinal) {
  shared.dealt[ordinal % kDealt].wait(ordinal / kDealt % 2);
  return shared.items[ordinal % kDealt];
}
// Takes it, by a warp, unless another one does. All have tokens, so that roles are no more items
// apart than there are chunks at hand.
template <class S, int kStages>
__device__ __forceinline__ void claim(Shared<S, kStages>& shared, const CallArgs& a,
                                      const DeltaPieceArgs& cut, int ordinal, int lane) {
  bool own = false;
  if (lane == 0) own = atomicCAS(&shared.claimed, ordinal, ordinal + 1) == ordinal;
  if (!__shfl_sync(0xffffffffu, own, 0)) return;
  const unsigned parts = static_cast<unsigned>(a.H) * cut.column_blocks;
  const unsigned all = static_cast<unsigned>(a.N) * parts;
  unsigned ticket = ordinal == 0 ? block_index() : all;
  if (lane == 0 && ordinal > 0 && gridDim.x < all) ticket = gridDim.x + atomicAdd(cut.arrivals, 1u);
  Queue queue(a, parts, false, lane);
  queue.resume(shared.queue);
  const QueueItem item = queue.find(__shfl_sync(0xffffffffu, ticket, 0));
  queue.leave(shared.queue);
  if (lane == 0)
    shared.items[ordinal % kDealt] = item.n < 0 ? -1 : item.n * static_cast<int>(parts) + item.part;
  arrive(shared.dealt[ordinal % kDealt], lane);
}

// A gate or, in the second half of a warp, a beta of one of 16 tokens, as it is stored, on its way.
struct Fetched {
  unsigned bits;
  bool real;

  __device__ __forceinline__ void fetch(const CallArgs& a, const Cursor& at, int block, int lane) {
    const int t = at.token() + block * kBlock + lane % 16;
    const bool beta = lane / 16;
    const int kind = beta ? a.beta_kind : a.gate_kind;
    const long long from = (beta ? at.betas : at.gates) +
                           t * (beta ? a.beta_stride[1] : a.gate_stride[1]) * stored_bytes(kind);
    real = at.index >= 0 && t < at.stop;
    bits = 0;
    if (real && kind % 2)
      bits = *reinterpret_cast<const unsigned short*>(from);
    else if (real && kind != kAbsent)
      bits = *reinterpret_cast<const unsigned*>(from);
  }
  // Past the last token: gate 1, beta 0.
  __device__ __forceinline__ float value(const CallArgs& a, int lane) const {
    const bool beta = lane / 16;
    const int kind = beta ? a.beta_kind : a.gate_kind;
    float x = __uint_as_float(kind % 2 ? bits << 16 : bits);
    if (kind >= kLogOfInputs) x = exp(x);
    if (!real || kind == kAbsent) x = !real && beta ? 0.f : 1.f;
    return beta ? x : nan_if_infinite(x);
  }
};
