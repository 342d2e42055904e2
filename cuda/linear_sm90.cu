// The linear rule in chunks of 64 tokens on the warpgroup products of sm_90a, for bfloat16 inputs
// that the copy engine can read. The equations are those of linear.cu.
//
// A block walks through the chunks of a sequence of one head. Its warpgroups have roles:
//   the first feeds: one warp has q, k and v copied, three make decays;
//   one for every 64 rows of the state keeps them and writes them, rounded, into shared memory;
//   the others make outputs, by turns.
// Stages, tables of decays and rounded states go from hand to hand through barriers in shared
// memory.
//
// Where heads are too few to fill the chip (kPieces), each block has a piece of a sequence and
// walks through it twice: first from its end to its start for the state it would leave if it began
// with none, then, once the blocks of the head have put their states together, for the outputs.
// What the first pass read last, the second finds in the L2 cache. All blocks must run at once.
#include "chunk.cuh"
#include "hopper.cuh"
#include "scores.cuh"

constexpr int kGroup = 128;         // threads of a warpgroup
constexpr int kTile = kChunk * 64;  // 16-bit numbers of a tile of 64 rows
constexpr int kDecayWarps = 3;

// States of pieces lie as the warpgroups hold them: see Places.
struct PieceArgs {
  float* states;       // (pieces, N, H, K * V of the kernel): after each from zero, then before it
  float* decays;       // (pieces, N, H)
  unsigned* arrivals;  // (N, H, 2), zeros: pieces with a state, and blocks done putting together
  long long piece_size;  // tokens, whole chunks
  int pieces;
  int K, V;       // as given; the kernel's own are rounded up to tiles
  unsigned zero;  // 0, which the compiler must not know: see after
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
  static constexpr int kStateRegisters = kLarge ? 136 : 136;
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
};

// One of n things by turns, and how often it has been come back to, modulo 2.
template <int n>
struct Turn {
  int slot = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void next() {
    if (++slot == n) slot = 0, parity ^= 1;
  }
};

// The items of one block, one after the other: sequences of heads, or one piece of one. Packed
// sequences are dealt out by their lengths, in runs of about as many tokens for every block.
struct Walk {
  const CallArgs& a;
  const PieceArgs& cut;
  int item, step, items;
  int n = 0, b = 0, h = 0, piece = 0, start = 0, stop = 0, end = 0, chunks = 0;

  __device__ __forceinline__ Walk(const CallArgs& call, const PieceArgs& pieces)
      : a(call), cut(pieces), item(blockIdx.x), step(gridDim.x) {
    items = static_cast<int>(a.N * a.H) * cut.pieces;
    if (a.cu_seqlens && cut.pieces == 1) {
      const long long all = weight(a, static_cast<int>(a.N)) * a.H;
      item = first_from(a, all * blockIdx.x / gridDim.x);
      if (blockIdx.x + 1 < gridDim.x) items = first_from(a, all * (blockIdx.x + 1) / gridDim.x);
      step = 1;
    }
  }

  __device__ __forceinline__ bool next() {
    if (item >= items) return false;
    const int H = static_cast<int>(a.H), nh = item / cut.pieces;
    piece = item % cut.pieces;
    n = nh / H;
    h = nh % H;
    const Sequence seq = sequence(a, n);
    b = static_cast<int>(seq.b);
    end = static_cast<int>(seq.stop);
    start = static_cast<int>(min(seq.start + piece * cut.piece_size, seq.stop));
    stop = static_cast<int>(min(start + cut.piece_size, seq.stop));
    chunks = (stop - start + kChunk - 1) / kChunk;
    item += step;
    return true;
  }
  __device__ __forceinline__ long long head() const { return n * a.H + h; }
  __device__ __forceinline__ bool last_piece() const { return piece == cut.pieces - 1; }
  // The first token of the chunk that is worked on in turn c.
  __device__ __forceinline__ int token(int c, bool backwards) const {
    return start + (backwards ? chunks - 1 - c : c) * kChunk;
  }

 private:
  // Tokens before sequence n, and a chunk for what each sequence costs besides.
  static __device__ __forceinline__ long long weight(const CallArgs& a, int n) {
    return offset(a, n) + static_cast<long long>(kChunk) * n;
  }
  // The first item with at least so much weight before it.
  static __device__ __forceinline__ int first_from(const CallArgs& a, long long before) {
    int low = 0, high = static_cast<int>(a.N);
    while (low + 1 < high) {
      const int middle = low + (high - low) / 2;
      (weight(a, middle) * a.H <= before ? low : high) = middle;
    }
    const long long own = max(weight(a, low + 1) - weight(a, low), 1ll);
    const long long rest = before - weight(a, low) * a.H, heads = (rest + own - 1) / own;
    return low * static_cast<int>(a.H) + static_cast<int>(max(0ll, min(heads, a.H)));
  }
};

// Where what a thread holds of a state belongs. Number i of a warp's 16 rows is at row
// lane / 4 + i / 2 % 2 * 8 and column i / 4 * 8 + lane % 4 * 2 + i % 2.
template <int K, int V>
struct Places {
  int row, col, thread;

  // f(number, its place in a (K, V) array of the user's, whether it is there)
  template <class F>
  __device__ __forceinline__ void each(float (&x)[V / 2], const PieceArgs& pieces, F f) const {
    const int upper = row * pieces.V + col, lower = upper + 8 * pieces.V;
#pragma unroll
    for (int i = 0; i < V / 2; i++) {
      const int step = i / 4 * 8 + i % 2;
      const bool below = i / 2 % 2;
      f(x[i], (below ? lower : upper) + step,
        row + (below ? 8 : 0) < pieces.K && col + step < pieces.V);
    }
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
};

// Has gates of chunk c of an item fetched, which is the slot-th of the block.
__device__ __forceinline__ void fetch_gates(GateRing& gates, const Walk& w, int c, unsigned slot,
                                            bool backwards, int lane) {
  const int t = w.token(c, backwards);
  gates.fetch(slot % GateRing::kSlots, w.a, w.b, w.h, t, c < w.chunks ? w.stop : t, lane);
}

// Has the chunks of an item copied, by one thread.
template <class S, int kStages>
__device__ __forceinline__ void load(Shared<S, kStages>& shared, const Walk& w,
                                     Turn<kStages>& stage, const TensorMap& q_map,
                                     const TensorMap& k_map, const TensorMap& v_map,
                                     bool backwards) {
  const int hq = w.h / static_cast<int>(w.a.group);
  for (int c = 0; c < w.chunks; c++, stage.next()) {
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

// Makes the decays of every third chunk of a block, by one warp; done counts the block's chunks
// before those of this pass.
template <class S, int kStages>
__device__ __forceinline__ void make_decays(Shared<S, kStages>& shared, const Walk& w,
                                            unsigned done, unsigned turn, bool backwards,
                                            int lane) {
  const int first = (turn + kDecayWarps - done % kDecayWarps) % kDecayWarps;
#pragma unroll 1
  for (int c = first; c < first + 3 * kDecayWarps; c += kDecayWarps)
    fetch_gates(shared.gates, w, c, done + c, backwards, lane);
  for (int c = first; c < w.chunks; c += kDecayWarps) {
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
      if constexpr (kStages < S::kDecays)  // the stage is on its way to this chunk, not to the last
        if (at >= kStages) shared.decays_free[before % S::kDecays].wait(before / S::kDecays % 2);
      shared.loaded[stage].wait(at / kStages % 2);
#pragma unroll 1
      for (int i = 0; i < S::kKeyTiles + S::kValueTiles; i++)
#pragma unroll 1
        for (int e = left * 64 + lane; e < kTile; e += 32) keys[i * kTile + e] = 0;
      fence_shared();
    }
    __syncwarp();
    if (lane == 0) shared.decays_made[table].arrive();
    const int later = c + 3 * kDecayWarps;
    fetch_gates(shared.gates, w, later, done + later, backwards, lane);
  }
}

// One warpgroup's 64 rows of a state.
template <int K, int V, int kStages>
struct State {
  using S = Shape<K, V>;
  Shared<S, kStages>& shared;
  int row0, warp, lane;
  bool twice;  // also lets go for the output group, which has no part in the first pass
  int own;     // where this lane reads keys, transposed, in a stage
  unsigned zero;
  Turn<kStages> stage, ahead;
  Turn<S::kDecays> table;
  Turn<S::kStates> state;
  float s[V / 2];

  __device__ __forceinline__ State(Shared<S, kStages>& memory, int group, int w, int l, unsigned z)
      : shared(memory),
        row0(group * 64 + w * 16),
        warp(w),
        lane(l),
        twice(group == 0),
        own(S::kQuery + group * kTile + swizzled(l / 16 * 8 + l % 8, w * 2 + l / 8 % 2)),
        zero(z) {}

  // Takes in the chunks of an item; backwards, returns the decay of all of them.
  template <bool kBackwards>
  __device__ __forceinline__ float pass(int chunks) {
    float whole = 1;                            // decay of the chunks so far
    float all = 1;                              // of the chunk at hand
    unsigned kt[kBlocks][4], next[kBlocks][4];  // its keys, weighed, and those of the one after
    if (chunks > 0) prepare<kBackwards>(kt, all, whole);
    for (int c = 0; c < chunks; c++, stage.next()) {
      if constexpr (!kBackwards) publish(all);
      const unsigned short* const v = shared.stages[stage.slot] + S::kQuery + S::kKeyTiles * kTile;
      settle(s);
      wgmma_begin();
#pragma unroll
      for (int j = 0; j < kBlocks; j++)
        wgmma<true>(s, kt[j], factor(v + j * kBlock * 64, 2 * kTile));
      wgmma_commit();
      if (c + 1 < chunks) prepare<kBackwards>(next, all, whole);
      wgmma_wait<0>();
      settle(s);
      __syncwarp();
      if (lane == 0) shared.free[stage.slot].arrive();
      if (kBackwards && twice && lane == 0) shared.free[stage.slot].arrive();
      const unsigned none = after(s[0], zero);
#pragma unroll
      for (int j = 0; j < kBlocks; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) kt[j][i] = next[j][i] | kt[j][i] & none;
    }
    return whole;
  }

 private:
  // Weighs the keys of the next chunk.
  template <bool kBackwards>
  __device__ __forceinline__ void prepare(unsigned (&kt)[kBlocks][4], float& all, float& whole) {
    const Decay& decay = shared.decays[table.slot];
    const unsigned short* const k = shared.stages[ahead.slot] + own;
    shared.decays_made[table.slot].wait(table.parity);
    shared.loaded[ahead.slot].wait(ahead.parity);
#pragma unroll
    for (int j = 0; j < kBlocks; j++) ldmatrix_x4<true>(kt[j], k + j * kBlock * 64);
    const bool wild = decay.wild || (kBackwards && !(fabsf(whole) <= kWildProduct));
    if (__builtin_expect(wild, 0))
      weigh_keys<true, kBackwards>(kt, decay, whole, lane);
    else
      weigh_keys<false, kBackwards>(kt, decay, whole, lane);
    all = decay.whole;
    if (kBackwards) whole = bounded(whole * all);
    __syncwarp();
    if (lane == 0) shared.decays_free[table.slot].arrive();
    if (kBackwards && twice && lane == 0) shared.decays_free[table.slot].arrive();
    table.next();
    ahead.next();
  }

  // Writes the state, rounded, for the outputs, and decays it.
  __device__ __forceinline__ void publish(float all) {
    unsigned short* const to = shared.states[state.slot];
    shared.state_free[state.slot].wait(state.parity ^ 1);
#pragma unroll
    for (int i = 0; i < V / 16; i++)
      stmatrix_x4(to + i / 4 * (K * 64) + swizzled(row0 + lane % 16, i % 4 * 2 + lane / 16),
                  pack_bfloat16(s[8 * i], s[8 * i + 1]), pack_bfloat16(s[8 * i + 2], s[8 * i + 3]),
                  pack_bfloat16(s[8 * i + 4], s[8 * i + 5]),
                  pack_bfloat16(s[8 * i + 6], s[8 * i + 7]));
    fence_shared();
    __syncwarp();
    if (lane == 0) shared.state_made[state.slot].arrive();
    state.next();
#pragma unroll
    for (int i = 0; i < V / 2; i++) s[i] *= all;
  }
};

// Four numbers of the initial state, those at place e of a piece's.
template <int K>
__device__ __forceinline__ float4 given_four(const CallArgs& a, const PieceArgs& cut, const Walk& w,
                                             int e) {
  float4 x = {0, 0, 0, 0};
  if (!a.initial_state) return x;
  const int row = e % (2 * K) / 32 * 16 + e % 32 / 4, col = e / (2 * K) * 8 + e % 4 * 2;
  const float* const at =
      static_cast<const float*>(a.initial_state) + w.head() * (cut.K * cut.V) + row * cut.V + col;
  const bool left = col < cut.V, right = col + 1 < cut.V, lower = row + 8 < cut.K;
  if (row < cut.K && left) x.x = at[0];
  if (row < cut.K && right) x.y = at[1];
  if (lower && left) x.z = at[8 * cut.V];
  if (lower && right) x.w = at[8 * cut.V + 1];
  return x;
}

// States before each piece of a head from those after each piece, S <- decay S + state, for this
// block's share of their numbers, from kBatch pieces at a time.
template <int K, int V, int kBatch, int kThreads>
__device__ __forceinline__ void join(const CallArgs& a, const PieceArgs& cut, const Walk& w,
                                     int thread) {
  constexpr int kSize = K * V / 4;  // in fours
  const int pieces = cut.pieces, NH = static_cast<int>(a.N * a.H);
  float4* const states = reinterpret_cast<float4*>(cut.states + w.head() * (K * V));
  const float* const decays = cut.decays + w.head();
#pragma unroll 1
  for (int e = w.piece * kThreads + thread; e < kSize; e += pieces * kThreads) {
    float4 s = given_four<K>(a, cut, w, e);
#pragma unroll 1
    for (int p0 = 0; p0 < pieces; p0 += kBatch) {
      float4 own[kBatch];
      float decay[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const int p = min(p0 + i, pieces - 2);
        decay[i] = __ldcg(decays + p * NH);
        own[i] = __ldcg(states + p * NH * kSize + e);
      }
#pragma unroll
      for (int i = 0; i < kBatch; i++) {
        if (p0 + i < pieces) __stcg(states + (p0 + i) * NH * kSize + e, s);
        s = {s.x * decay[i] + own[i].x, s.y * decay[i] + own[i].y, s.z * decay[i] + own[i].z,
             s.w * decay[i] + own[i].w};
      }
    }
  }
}

// Counts a block in, once all of the calling threads have written what others will read.
template <int kThreads>
__device__ __forceinline__ void arrive_all(unsigned* count, int barrier, bool first) {
  sync_threads<kThreads>(barrier);
  if (!first) return;
  __threadfence();
  atomicAdd(count, 1u);
}
// Until so many blocks have been counted in, for all of the calling threads.
template <int kThreads>
__device__ __forceinline__ void wait_all(const unsigned* count, unsigned blocks, int barrier,
                                         bool first) {
  if (first) {
    while (*static_cast<const volatile unsigned*>(count) < blocks) __nanosleep(20);
    __threadfence();
  }
  sync_threads<kThreads>(barrier);
}

// grid: any number of blocks, or as many as there are pieces. block: 512 threads.
template <int K, int V, int kStages, bool kPieces>
__global__ void __launch_bounds__(4 * kGroup, 1)
    linear(const CallArgs a, const PieceArgs pieces, const __grid_constant__ TensorMap q_map,
           const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map,
           const __grid_constant__ TensorMap y_map) {
  using S = Shape<K, V>;
  DYNAMIC_SHARED(unsigned char, raw);
  auto& shared =
      *reinterpret_cast<Shared<S, kStages>*>(raw + (1024 - shared_address(raw) % 1024) % 1024);
  const int group = threadIdx.x / kGroup, lane = threadIdx.x % 32;
  const unsigned warp = threadIdx.x / 32 % 4;
  const auto twice = [](const Walk& w) { return kPieces && !w.last_piece(); };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      shared.loaded[i].init(1);
      shared.free[i].init(S::kConsumers);
    }
    for (int i = 0; i < S::kDecays; i++) {
      shared.decays_made[i].init(1);
      shared.decays_free[i].init(S::kConsumers);
    }
    for (int i = 0; i < S::kStates; i++) {
      shared.state_made[i].init(4 * S::kStateGroups);
      shared.state_free[i].init(4);
    }
    fence_barriers();
  }
  __syncthreads();

  if (group == 0) {
    set_registers<128, S::kFeedRegisters>();
    Walk w(a, pieces);
    if (warp == 0) {
      if (lane > 0) return;
      Turn<kStages> stage;
      while (w.next()) {
#pragma unroll 1
        for (int backwards = twice(w); backwards >= 0; backwards--)
          load(shared, w, stage, q_map, k_map, v_map, backwards);
      }
    } else {
      unsigned done = 0;
      while (w.next()) {
#pragma unroll 1
        for (int backwards = twice(w); backwards >= 0; backwards--, done += w.chunks)
          make_decays(shared, w, done, warp - 1, backwards, lane);
      }
    }
  } else if (group <= S::kStateGroups) {
    set_registers<128, S::kStateRegisters>();
    constexpr int kThreads = S::kStateGroups * kGroup, kBarrier = 3;
    const int thread = threadIdx.x - kGroup;
    State<K, V, kStages> state(shared, group - 1, warp, lane, pieces.zero);
    const Places<K, V> places{state.row0 + lane / 4, lane % 4 * 2, thread};
    Walk w(a, pieces);
    while (w.next()) {
      const long long user_state = w.head() * (static_cast<long long>(pieces.K) * pieces.V);
      if constexpr (kPieces) {
        const long long at = w.piece * (a.N * a.H) + w.head();
        float4* const own = reinterpret_cast<float4*>(pieces.states + at * (K * V));
        unsigned* const arrivals = pieces.arrivals + 2 * w.head();
        if (!w.last_piece()) {
#pragma unroll
          for (int i = 0; i < V / 2; i++) state.s[i] = 0;
          const float whole = state.template pass<true>(w.chunks);
          places.write(state.s, own);
          if (thread == 0) __stcg(pieces.decays + at, whole);
          arrive_all<kThreads>(arrivals, kBarrier, thread == 0);
        }
        wait_all<kThreads>(arrivals, pieces.pieces - 1, kBarrier, thread == 0);
        join<K, V, 8, kThreads>(a, pieces, w, thread);
        arrive_all<kThreads>(arrivals + 1, kBarrier, thread == 0);
        wait_all<kThreads>(arrivals + 1, pieces.pieces, kBarrier, thread == 0);
        places.read(state.s, own);
      } else {
        const float* const from =
            a.initial_state ? static_cast<const float*>(a.initial_state) + user_state : nullptr;
        places.each(state.s, pieces,
                    [=](float& x, int at, bool real) { x = from && real ? from[at] : 0.f; });
      }
      state.template pass<false>(w.chunks);
      if (a.state && w.last_piece()) {
        float* const to = static_cast<float*>(a.state) + user_state;
        places.each(state.s, pieces, [=](float& x, int at, bool real) {
          if (real) to[at] = x;
        });
      }
    }
  } else {
    set_registers<128, S::kOutRegisters>();
    const int turn = group - 1 - S::kStateGroups;
    unsigned short* const out = shared.outs[turn];
    const float scale = static_cast<float>(a.scale);
    Walk w(a, pieces);
    Turn<kStages> stage;
    Turn<S::kDecays> table;
    Turn<S::kStates> state;
    Turn<S::kOutGroups> group_at;
    while (w.next()) {
      if (twice(w)) {  // this group has no part in the first pass, and waits for its end
        for (int c = 0; c < w.chunks; c++) stage.next(), table.next();
        if (w.chunks > turn) shared.state_made[turn].wait(0);  // the first state it will consume
      }
      unsigned short* const y =
          static_cast<unsigned short*>(a.y) + w.b * a.y_stride[0] + w.h * a.y_stride[2];
      for (int c = 0; c < w.chunks;
           c++, stage.next(), table.next(), state.next(), group_at.next()) {
        if (group_at.slot != turn) continue;
        const unsigned short* const q = shared.stages[stage.slot];
        const unsigned short* const k = q + S::kQuery;
        const unsigned short* const v = k + S::kKeyTiles * kTile;
        const Decay& decay = shared.decays[table.slot];
        float scores[32], o[V / 2];
        shared.decays_made[table.slot].wait(table.parity);
        shared.loaded[stage.slot].wait(stage.parity);
        settle(scores);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < K / 16; i++)
          wgmma<false>(scores, factor(q + i / 4 * kTile + i % 4 * 16),
                       factor(k + i / 4 * kTile + i % 4 * 16), i == 0);
        wgmma_commit();
        shared.state_made[state.slot].wait(state.parity);
        settle(o);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < K / 16; i++)
          wgmma<true>(o, factor(q + i / 4 * kTile + i % 4 * 16),
                      factor(shared.states[state.slot] + i * 16 * 64, K * 128), i == 0);
        wgmma_commit();
        const RowWeights weights(decay, warp, lane, scale);
        const float from0 = bounded(scale * decay.from_start[warp * kBlock + lane / 4]);
        const float from1 = bounded(scale * decay.from_start[warp * kBlock + lane / 4 + 8]);
        wgmma_wait<1>();
        settle(scores);
        unsigned p[kBlocks][4];
        if (__builtin_expect(decay.wild, 0))
          weigh_row<true>(p, scores, decay, warp, lane, scale);
        else
          weights.weigh(p, scores, decay, warp, lane);
        wgmma_wait<0>();
        settle(o);
        __syncwarp();
        if (lane == 0) {
          shared.state_free[state.slot].arrive();
          shared.decays_free[table.slot].arrive();
        }
#pragma unroll
        for (int i = 0; i < V / 2; i++) o[i] *= i / 2 % 2 ? from1 : from0;
        settle(o);
        wgmma_begin();
#pragma unroll
        for (int j = 0; j < kBlocks; j++)
          wgmma<true>(o, p[j], factor(v + j * kBlock * 64, 2 * kTile));
        wgmma_commit();
        if (warp == 0 && lane == 0) wait_stores_read();
        sync_threads<kGroup>(1 + turn);  // the tile before has been stored
        wgmma_wait<0>();
        settle(o);
        __syncwarp();
        if (lane == 0) shared.free[stage.slot].arrive();
        const unsigned none = after(o[0], pieces.zero);
#pragma unroll
        for (int i = 0; i < V / 16; i++) {
          unsigned packed[4];
#pragma unroll
          for (int j = 0; j < 4; j++)
            packed[j] = pack_bfloat16(o[8 * i + 2 * j], o[8 * i + 2 * j + 1]) |
                        (i < kBlocks ? p[i][j] & none : 0);
          stmatrix_x4(
              out + i / 4 * kTile + swizzled(warp * kBlock + lane % 16, i % 4 * 2 + lane / 16),
              packed[0], packed[1], packed[2], packed[3]);
        }
        fence_shared();
        sync_threads<kGroup>(1 + turn);
        const int t = w.start + c * kChunk;
        if (t + kChunk <= w.stop || w.stop == a.T) {
          if (warp == 0 && lane == 0) {
            for (int i = 0; i < S::kValueTiles; i++)
              store_tile(y_map, out + i * kTile, i * 64, w.h, t, w.b);
            commit_stores();
          }
        } else {  // rows of the next sequence follow
#pragma unroll 1
          for (int e = threadIdx.x % kGroup; e < kChunk * V; e += kGroup) {
            const int row = e / V, col = e % V;
            if (t + row < w.stop && col < pieces.V)
              y[static_cast<long long>(t + row) * a.y_stride[1] + col] =
                  out[col / 64 * kTile + swizzled(row, col % 64 / 8) + col % 8];
          }
        }
      }
      if (a.cu_seqlens && w.n == a.N - 1 && w.last_piece())  // tokens of no sequence
#pragma unroll 1
        for (long long e = threadIdx.x % kGroup; e < (a.T - w.end) * pieces.V; e += kGroup)
          y[(w.end + e / pieces.V) * a.y_stride[1] + e % pieces.V] = 0;
    }
    if (warp == 0 && lane == 0) wait_stores();
  }
}
