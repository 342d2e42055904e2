// What the roles of linear_sm90.cu share, and the one that feeds: copies of q, k and v, and decays.
#pragma once
#include "arrive.cuh"
#include "chunk.cuh"
#include "longest_first.cuh"
#include "warpgroups.cuh"

constexpr int kDecayWarps = 3;
constexpr int kSure = kDecayWarps;  // chunks that a first pass takes in, if there are so many
constexpr int kItems = 4;           // of a queue, that a block's feeder may be ahead

// States of pieces lie as the warpgroups hold them: see Places.
struct PieceArgs {
  float* states;  // (pieces, N, H, K * V of the kernel): after each from zero, then before it
  float* decays;  // (pieces, N, H)
  unsigned long long* progress;  // (N, H, pieces): see Piece
  unsigned* taken;               // one, 0: of those who took from a queue
  long long piece_size;          // tokens, whole chunks
  int pieces;
  int K, V;                 // as given; the kernel's own are rounded up to tiles
  unsigned zero;            // 0, which the compiler must not know: see after
  unsigned long long call;  // of 56 bits, this one and no other
};

template <int K, int V>
struct Shape {
  static constexpr int kKeyTiles = K / 64, kValueTiles = V / 64;
  static constexpr int kStateGroups = kKeyTiles, kOutGroups = 3 - kStateGroups;
  static constexpr int kThreads = 4 * kGroup;
  static constexpr bool kLarge = K * V > 64 * 128;
  static constexpr int kDecays = kLarge ? 3 : 6;  // tables, the same number for each warp
  static constexpr int kStates = kLarge ? 1 : 2;
  static constexpr int kQuery = kKeyTiles * kTile,
                       kKeysAndValues = (kKeyTiles + kValueTiles) * kTile;
  static constexpr int kStateSize = kKeyTiles * kValueTiles * kTile;
  static constexpr int kOutSize = kValueTiles * kTile;
  static constexpr int kFeedRegisters = kLarge ? 80 : 88;  // of a thread; 512 in the four groups
  static constexpr int kStateRegisters = 136;
  static constexpr int kOutRegisters = kLarge ? 160 : 144;
  static constexpr int kConsumers = 4 * (kStateGroups + 1);  // warps, of one chunk
};

// Everything in shared memory, from a multiple of 1024 bytes on. Sizes are in 16-bit numbers.
template <class S, int kStages>
struct Shared {
  unsigned short stages[kStages][S::kQuery + S::kKeysAndValues];  // q, k, v
  unsigned short states[S::kStates][S::kStateSize];
  unsigned short outs[S::kOutGroups][S::kOutSize];
  Decay decays[S::kDecays];
  GateRing gates;
  Barrier loaded[kStages], free[kStages];
  Barrier decays_made[S::kDecays], decays_free[S::kDecays];
  Barrier state_made[S::kStates], state_free[S::kStates];
  // Of pieces: the chunks that the first pass takes in, whether all is to be done again with all of
  // them, and when each is known.
  Barrier counted, judged;
  int needed, again;
  unsigned marks, padding;
  Barrier dealt[kItems], taken[kItems];
  QueueItem items[kItems];
};

// The first of two turns that began together, by the second where they are the same.
template <int m, int n>
__device__ __forceinline__ Turn<m> same_turn(const Turn<m>& first, const Turn<n>& second) {
  if constexpr (m == n) return second;
  return first;
}

// The items of one block, one after the other: sequences of heads, or one piece of one.
struct Walk {
  const CallArgs& a;
  const PieceArgs& cut;
  int item;
  int n = 0, b = 0, h = 0, piece = 0, start = 0, stop = 0, end = 0, chunks = 0;

  __device__ __forceinline__ Walk(const CallArgs& call, const PieceArgs& pieces)
      : a(call), cut(pieces), item(block_index()) {}

  __device__ __forceinline__ bool next() {
    if (item >= static_cast<int>(a.N * a.H) * cut.pieces) return false;
    // Without a sign, which quotients are quicker by.
    const unsigned H = static_cast<unsigned>(a.H), pieces = cut.pieces, all = item;
    const unsigned nh = all / pieces;
    piece = all % pieces;
    n = nh / H;
    h = nh % H;
    const Sequence seq = sequence(a, n);
    b = static_cast<int>(seq.b);
    end = static_cast<int>(seq.stop);
    start = static_cast<int>(min(seq.start + piece * cut.piece_size, seq.stop));
    stop = static_cast<int>(min(start + cut.piece_size, seq.stop));
    chunks = (stop - start + kChunk - 1) / kChunk;
    item += gridDim.x;
    return true;
  }
  __device__ __forceinline__ void begin(const QueueItem& item) {
    n = item.n;
    h = item.part;
    start = item.start;
    stop = end = item.stop;
    chunks = (stop - start + kChunk - 1) / kChunk;
  }
  __device__ __forceinline__ long long head() const { return n * a.H + h; }
  __device__ __forceinline__ bool last_piece() const { return piece == cut.pieces - 1; }
  // The first token of the chunk that is worked on in turn c.
  __device__ __forceinline__ int token(int c, bool backwards) const {
    return start + (backwards ? chunks - 1 - c : c) * kChunk;
  }
};

// Where what a thread holds of a state belongs. Number i of a warp's 16 rows is at row
// lane / 4 + i / 2 % 2 * 8 and column i / 4 * 8 + lane % 4 * 2 + i % 2.
template <int K, int V>
struct Places {
  int row, col, thread;

  // From a (K, V) array of the user's, zeros where there is none.
  __device__ __forceinline__ void read(float (&x)[V / 2], const PieceArgs& pieces,
                                       const float* from) const {
    each(pieces, from, [&](int i, int at, bool real) { x[i] = real ? from[at] : 0.f; });
  }
  __device__ __forceinline__ void write(const float (&x)[V / 2], const PieceArgs& pieces,
                                        float* to) const {
    each(pieces, true, [&](int i, int at, bool real) {
      if (real) to[at] = x[i];
    });
  }
  // The same for the state of a piece, four numbers at once.
  __device__ __forceinline__ void read(float (&x)[V / 2], const float4* from) const {
#pragma unroll
    for (int i = 0; i < V / 8; i++) {
      const float4 y = __ldcg(from + i * (2 * K) + thread);
      x[4 * i] = y.x, x[4 * i + 1] = y.y, x[4 * i + 2] = y.z, x[4 * i + 3] = y.w;
    }
  }
  __device__ __forceinline__ void write(const float (&x)[V / 2], float4* to) const {
#pragma unroll
    for (int i = 0; i < V / 8; i++)
      __stcg(to + i * (2 * K) + thread, float4{x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]});
  }

 private:
  // f(number, its place in the array, whether it is there)
  template <class F>
  __device__ __forceinline__ void each(const PieceArgs& pieces, bool given, F f) const {
    const int upper = row * pieces.V + col, lower = upper + 8 * pieces.V;
    const int upper_left = given && row < pieces.K ? pieces.V - col : 0;
    const int lower_left = given && row + 8 < pieces.K ? pieces.V - col : 0;
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
      const int step = i / 4 * 8 + i % 2;
      const bool below = i / 2 % 2;
      f(i, (below ? lower : upper) + step, step < (below ? lower_left : upper_left));
    }
  }
};

// Has gates of chunk c of an item fetched, which is the slot-th of the block.
__device__ __forceinline__ void fetch_gates(GateRing& gates, const Walk& w, int c, unsigned slot,
                                            bool backwards, int lane) {
  const int t = w.token(c, backwards);
  gates.fetch<1>(slot % GateRing::kSlots, w.a, w.b, w.h, t, c < w.chunks ? w.stop : t, lane);
}

// Has chunks c to stop of an item copied, by one thread.
template <class S, int kStages>
__device__ __forceinline__ void load(Shared<S, kStages>& shared, const Walk& w, int c, int stop,
                                     Turn<kStages>& stage, const TensorMap& q_map,
                                     const TensorMap& k_map, const TensorMap& v_map,
                                     bool backwards) {
  const int hq = w.h / static_cast<int>(w.a.group);
  for (; c < stop; c++, stage.next()) {
    const int t = w.token(c, backwards);
    unsigned short* to = shared.stages[stage.slot];
    Barrier& barrier = shared.loaded[stage.slot];
    shared.free[stage.slot].wait(stage.parity ^ 1);
    barrier.arrive_and_expect(2 * (S::kKeysAndValues + (backwards ? 0 : S::kQuery)));
    for (int i = 0; i < S::kKeyTiles; i++, to += kTile)
      if (!backwards) load_tile(to, q_map, i * 64, hq, t, w.b, barrier);
    for (int i = 0; i < S::kKeyTiles; i++, to += kTile)
      load_tile(to, k_map, i * 64, hq, t, w.b, barrier);
    for (int i = 0; i < S::kValueTiles; i++, to += kTile)
      load_tile(to, v_map, i * 64, w.h, t, w.b, barrier);
  }
}

// The first chunk of an item whose decays are one warp's, those of a block by turns.
__device__ __forceinline__ int first_chunk(unsigned done, unsigned turn) {
  return (turn + kDecayWarps - done % kDecayWarps) % kDecayWarps;
}

constexpr int kAhead = 3 * kDecayWarps;  // chunks that gates are fetched before

// Has the gates of a warp's first three chunks of an item fetched.
__device__ __forceinline__ void begin_decays(GateRing& gates, const Walk& w, unsigned done,
                                             unsigned turn, bool backwards, int lane) {
  const int first = first_chunk(done, turn);
#pragma unroll 1
  for (int c = first; c < first + kAhead; c += kDecayWarps)
    fetch_gates(gates, w, c, done + c, backwards, lane);
}

// Makes the decays of every third chunk of a block, by one warp, which has or has not begun them;
// done counts the block's chunks before those of this pass, whose number is returned.
template <class S, int kStages>
__device__ __forceinline__ int make_decays(Shared<S, kStages>& shared, const Walk& w, unsigned done,
                                           unsigned turn, bool begun, bool backwards, bool counted,
                                           int lane) {
  const int first = first_chunk(done, turn);
  for (int c = begun ? first : first - kAhead; c < w.chunks; c += kDecayWarps) {
    if (c >= 0) {
      if (counted && c >= kSure) {
        shared.counted.wait(0);
        if (c >= shared.needed) break;
      }
      const unsigned at = done + c, table = at % S::kDecays;
      const int left = w.stop - w.token(c, backwards);
      Decay& decay = shared.decays[table];
      cp_async_wait<2>();
      shared.decays_free[table].wait(at / S::kDecays % 2 ^ 1);
      shared.gates.fill(decay, at % GateRing::kSlots, w.a, left, lane);
      __syncwarp();
      if (!backwards) decay.fill_diagonal(lane);
      if (left < kChunk && w.stop < w.a.T) {  // tokens of the next sequence, which may be NaN
        const unsigned stage = at % kStages, before = at - kStages;
        unsigned short* const keys = shared.stages[stage] + S::kQuery;
        // The stage is on its way to this chunk, not to the last.
        if constexpr (kStages < S::kDecays)
          if (at >= kStages) shared.decays_free[before % S::kDecays].wait(before / S::kDecays % 2);
        shared.loaded[stage].wait(at / kStages % 2);
#pragma unroll 1
        for (int e = left * 8 + lane; e < kTile / 8; e += 32)
#pragma unroll
          for (int i = 0; i < S::kKeyTiles + S::kValueTiles; i++)
            reinterpret_cast<uint4*>(keys + i * kTile)[e] = {0, 0, 0, 0};
        fence_shared();
      }
      arrive(shared.decays_made[table], lane);
    }
    const int later = c + kAhead;
    fetch_gates(shared.gates, w, later, done + later, backwards, lane);
  }
  if (!counted) return w.chunks;
  cp_async_wait<0>();  // slots come up again sooner than was thought
  shared.counted.wait(0);
  return shared.needed;
}
