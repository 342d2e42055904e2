// The role of delta_sm90.cu that keeps a state and makes outputs.
#pragma once
#include "delta_columns_sm90.cuh"

constexpr unsigned kMark = 1 << 16, kCount = kMark - 1;  // of arrivals

// Until a warpgroup of another block has been counted in so often; whether it has left a mark.
__device__ __forceinline__ bool wait_for(const unsigned* count, unsigned times) {
  const volatile unsigned* const now = count;
  while ((*now & kCount) < times) __nanosleep(100);
  return *now >= kMark;
}

// A warpgroup that keeps 64 columns of the state.
template <class S, int kStages, Dealing kDealing>
struct Keeper {
  static constexpr int K = S::kDim;
  static constexpr bool kPieces = kDealing == kInPieces;
  Shared<S, kStages>& shared;
  const CallArgs& a;
  const DeltaPieceArgs& cut;
  StateColumns64<K> state;
  int which;
  unsigned at = 0;  // which chunk of the block

  __device__ __forceinline__ Keeper(Shared<S, kStages>& memory, const CallArgs& call,
                                    const DeltaPieceArgs& pieces, int w)
      : shared(memory), a(call), cut(pieces), which(w) {}
  static __device__ __forceinline__ unsigned thread() { return StateColumns64<K>::thread(); }
  // All chunks of all items of the block.
  __device__ __forceinline__ void walk() {
#pragma unroll 1
    for (int next = kDealing == kByQueue ? following() : block_index();; next = following()) {
      begin(next);
      if (now().index < 0) break;
#pragma unroll 1
      for (int c = -warm(); c < now().chunks; c++) {
        if (kPieces && c == 0 && shared.grows[0]) take_over(now().index - cut.column_blocks);
        if (kPieces && c == shared.look) note_left_out();
        step(c);
      }
      end(now().index);
      if (kPieces && !go_through_again()) break;
    }
  }

 private:
  __device__ __forceinline__ int following() const {
    if constexpr (kDealing != kByQueue) return now().index + (kPieces ? 0 : gridDim.x);
    unsigned index = block_index();
    if (now().chunks > 0) {
      const int item = item_from_queue(shared, now().ordinal + 1);
      if (item >= 0) return item;
    } else {
      index = now().index + gridDim.x;
    }
    return without_tokens(index);
  }
  // The next item without tokens, from one of the block's on: a queue has none of them.
  __device__ __forceinline__ int without_tokens(unsigned index) const {
    const unsigned count = Item::count(a, cut);
#pragma unroll 1
    for (;; index += 32 * gridDim.x) {
      const unsigned own = index + thread() % 32 * gridDim.x;
      const bool here = own >= count || Item(a, cut, static_cast<int>(own)).chunks == 0;
      const unsigned found = __ballot_sync(0xffffffffu, here);
      if (found) return static_cast<int>(min(index + (__ffs(found) - 1) * gridDim.x, count));
    }
  }
  __device__ __forceinline__ int warm() const { return kPieces ? shared.warm_chunks : 0; }

  __device__ __forceinline__ int barrier() const { return S::kPreparers + 1 + which; }
  __device__ __forceinline__ int column(int block) const {
    return block * S::kColumns + which * 64;
  }
  __device__ __forceinline__ unsigned short* values(int slot) const {
    return shared.stages[slot] + 2 * S::kQuery + which * kTile;
  }
  // What belongs to the chunk at hand, found anew wherever registers are too few to keep it.
  __device__ __forceinline__ const unsigned short* queries() const {
    return shared.stages[afresh(at) % kStages];
  }
  __device__ __forceinline__ unsigned short* outputs() const {  // and v, before
    return values(afresh(at) % kStages);
  }
  __device__ __forceinline__ const TokenWeights& weights() const {
    return shared.weights[afresh(at) % S::kWeights];
  }
  __device__ __forceinline__ PreparedChunk& tables() const {
    return shared.tables[afresh(at) % kStages];
  }
  __device__ __forceinline__ Rests& rests() const { return shared.rests[afresh(at) % S::kRests]; }
  // The item at hand, and which of its chunks is one that tokens of the next sequence follow in.
  __device__ __forceinline__ volatile Cursor& now() const {
    return shared.cursors[4 * S::kPreparers + which];
  }
  // The next chunk, with its outputs in place of v.
  __device__ __forceinline__ void step(int c) {
    const unsigned slot = at % kStages, parity = at / kStages % 2;
    unsigned short* const v = values(slot);
    shared.prepared[slot].wait(parity);
    if (__builtin_expect(shorter(c), 0)) clear_rest(v, left(c));
    if (__builtin_expect(shared.strain[slot].any(), 0))
      take_carefully();
    else
      take(v);
    if (__builtin_expect(shorter(c), 0)) store_rest(v, c, left(c));
    fence_shared();
    arrive(shared.free[slot], thread() % 32);
    at++;
  }
  __device__ __forceinline__ int left(int c) const { return now().stop - now().start - c * kChunk; }
  __device__ __forceinline__ bool shorter(int c) const { return c == now().chunk; }

  __device__ __forceinline__ void wait_for_values() const {
    shared.values[at % kStages].wait(at / kStages % 2);
  }
  // Outputs in place of v.
  __device__ __forceinline__ void take(unsigned short* v) {
    const unsigned short* const q = shared.stages[at % kStages];
    const unsigned short* const k = q + S::kQuery;
    const TokenWeights& weights = shared.weights[at % S::kWeights];
    const PreparedChunk& chunk = shared.tables[at % kStages];
    unsigned x[kBlocks][4];
    float o[32], w[32];
    {
      unsigned rounded[K / 16][4];
      float u[32];
      state.round(rounded);
      state.read(u, rounded, k);
      constexpr int kPending = K == 64;  // for more, registers are too few
      if (kPending) state.read(o, rounded, q);
      wgmma_wait<kPending>();
      settle(u);
      wait_for_values();
      state.find_errors(x, u, v, weights);
      if (!kPending) state.read(o, rounded, q);
    }
    if (K > 64) state.decay(weights.whole);
    wgmma_wait<0>();
    settle(o);
    wgmma_begin();
    state.template multiply_table<true>(w, x, chunk.inverse);
    wgmma_commit();
    state.weigh(o, weights.out);
    if (K == 64) state.decay(weights.whole);
    wgmma_wait<0>();
    settle(w);
    state.pack(x, w);
    settle(o);
    wgmma_begin();
    state.template multiply_table<false>(o, x, chunk.scores);
    wgmma_commit();
    unsigned kept[kBlocks][4];
    state.weigh(w, weights.to_end);
    state.pack(kept, w);
    settle(state.s);
    wgmma_begin();
    state.add_keys(kept, k);
    wgmma_commit();
    wgmma_wait<1>();
    settle(o);
    state.put_outputs(v, o);
    wgmma_wait<0>();
    settle(state.s);
  }

  // The same with 16 bits of errors and of tables, or A itself for the inverse. Registers are too
  // few for all at once.
  __device__ __forceinline__ void take_carefully() {
    unsigned x[kBlocks][4], rest[kBlocks][4];
    {
      float u[32];
      state.read_slowly(u, queries() + S::kQuery, 0);
      wait_for_values();
      state.find_errors(x, u, outputs(), weights());
      if (shared.strain[afresh(at) % kStages].any() & kNearlySame) {
        ::substitute([&](int i) -> float& { return u[i]; },
                     [&](int r, int c) { return exact_block(tables(), rests(), r, c); },
                     thread() % 32);
      } else {
        state.pack_rests(rest, u);
        const unsigned short* const inverse = tables().inverse;
        settle(u);
        wgmma_begin();
        state.template multiply_table<true>(u, x, inverse);
        state.template multiply_table<false>(u, rest, inverse);
        wgmma_commit();
        wgmma_wait<0>();
        settle(u);
        state.multiply_rests(u, x, rests().inverse);
      }
      state.pack(x, u);
      state.pack_rests(rest, u);
    }
    // This one is over. It keeps the compiler from another order, in more registers.
    shared.loaded[at % kStages].wait(at / kStages % 2);
    sync_threads<kGroup>(barrier());
    uint4* const away = reinterpret_cast<uint4*>(outputs()) + thread();  // where v was, meanwhile
#pragma unroll
    for (int j = 0; j < kBlocks; j++)
      away[j * kGroup] = {rest[j][0], rest[j][1], rest[j][2], rest[j][3]};
    float o[32];
    state.read_slowly(o, queries(), __uint_as_float(cut.zero));
    state.weigh(o, weights().out);
#pragma unroll
    for (int j = 0; j < kBlocks; j++) {
      const uint4 four = away[j * kGroup];
      rest[j][0] = four.x, rest[j][1] = four.y, rest[j][2] = four.z, rest[j][3] = four.w;
    }
    settle(o);
    const unsigned short* const scores = tables().scores;
    wgmma_begin();
    state.template multiply_table<false>(o, x, scores);
    state.template multiply_table<false>(o, rest, scores);
    wgmma_commit();
    sync_threads<kGroup>(barrier());
    wgmma_wait<0>();
    settle(o);
    state.multiply_rests(o, x, rests().scores);
    state.put_outputs(outputs(), o);
    float w[32];
    state.unpack(w, x, rest);
    state.weigh(w, weights().to_end);
    if (weights().wild)
#pragma unroll
      for (int i = 0; i < 32; i++) w[i] = bounded(w[i]);
    state.pack(x, w);
    state.pack_rests(rest, w);
    state.decay(weights().whole);
    const unsigned short* const k = queries() + S::kQuery;
    settle(state.s);
    wgmma_begin();
    state.add_keys(x, k);
    state.add_keys(rest, k);
    wgmma_commit();
    wgmma_wait<0>();
    settle(state.s);
  }

  // Values of the next sequence, which may be NaN.
  __device__ __forceinline__ void clear_rest(unsigned short* v, int left) const {
    wait_for_values();
#pragma unroll 1
    for (int e = left * 64 + thread(); e < kTile; e += kGroup) v[e] = 0;
    sync_threads<kGroup>(barrier());
  }
  // Outputs where they follow.
  __device__ __forceinline__ void store_rest(const unsigned short* tile, int c, int left) const {
    sync_threads<kGroup>(barrier());
    const volatile Cursor& at = now();
    const int col0 = column(at.column_block), first = at.start + c * kChunk;
    unsigned short* const y =
        static_cast<unsigned short*>(a.y) + at.b * a.y_stride[0] + at.h * a.y_stride[2] + col0;
#pragma unroll 1
    for (int e = thread(); e < left * 64; e += kGroup) {
      const int row = e / 64, col = e % 64;
      if (col0 + col < cut.V)
        y[(first + row) * a.y_stride[1] + col] = tile[swizzled(row, col / 8) + col % 8];
    }
  }

  // The first state of an item.
  __device__ __forceinline__ void begin(int index) {
    const bool past = index >= Item::count(a, cut);
    const Item w(a, cut, past ? 0 : index);
    const int col0 = column(w.column_block);
    sync_threads<kGroup>(barrier());
    if (thread() == 0) {
      volatile Cursor& at = now();
      at.index = past ? -1 : index;
      if (kDealing == kByQueue) at.ordinal++;
      at.chunks = w.chunks, at.start = w.start, at.stop = w.stop, at.b = w.b, at.h = w.h;
      at.column_block = w.column_block;
      at.chunk = w.stop < a.T && (w.stop - w.start) % kChunk ? w.chunks - 1 : w.chunks;
    }
    sync_threads<kGroup>(barrier());
    if (past) return;
    if (a.initial_state && warm() * kChunk == w.start - w.begin) {
      const float* const from = static_cast<const float*>(a.initial_state) +
                                w.n * a.state_stride[0] + w.h * a.state_stride[1] +
                                col0 * a.state_stride[3];
      const int cols = cut.V - col0;
      state.each([&](float& x, int row, int col) {
        x = row < cut.K && col < cols ? from[row * a.state_stride[2] + col * a.state_stride[3]]
                                      : 0.f;
      });
    } else {
      state.each([](float& x, int, int) { x = 0; });
    }
  }
  __device__ __forceinline__ void end(int index) {
    const Item w(a, cut, afresh(index));
    const int col0 = column(w.column_block), cols = cut.V - col0;
    if (kPieces && w.piece < cut.pieces - 1) {
      hand_on(index);
      return;
    }
    if (a.state) {
      float* const to = static_cast<float*>(a.state) +
                        (w.n * a.H + w.h) * (static_cast<long long>(cut.K) * cut.V) + col0;
      state.each([&](float& x, int row, int col) {
        if (row < cut.K && col < cols) to[row * cut.V + col] = x;
      });
    }
    if (a.cu_seqlens && w.n == a.N - 1) clear_last(w);
  }
  // Outputs of tokens of no sequence, after the last one.
  __device__ __forceinline__ void clear_last(const Item& w) const {
    const int col0 = column(w.column_block), cols = min(64, cut.V - col0);
    unsigned short* const y = static_cast<unsigned short*>(a.y) + w.b * a.y_stride[0] +
                              w.h * a.y_stride[2] + w.end * a.y_stride[1] + col0;
    if (cols > 0)
#pragma unroll 1
      for (long long e = thread(); e < (a.T - w.end) * cols; e += kGroup)
        y[e / cols * a.y_stride[1] + e % cols] = 0;
  }

  // What a piece leaves, for the one after it, and what the one before has left.
  __device__ __forceinline__ void hand_on(int index) {
    index = index * S::kKeepers + which;
    float4* const to = place(index, shared.again > 0);
    if (shared.again == 0 && leaves_out_too_much()) shared.doubtful[which] = 1;
#pragma unroll
    for (int i = 0; i < K / 8; i++)
      __stcg(to + i * kGroup,
             float4{state.s[4 * i], state.s[4 * i + 1], state.s[4 * i + 2], state.s[4 * i + 3]});
    __threadfence();
    sync_threads<kGroup>(barrier());
    const bool mark = shared.again == 0 && shared.doubtful[which];
    if (thread() == 0) atomicAdd(cut.arrivals + index, mark ? 1 + kMark : 1);
  }
  __device__ __forceinline__ void take_over(int index) {
    index = index * S::kKeepers + which;
    const bool again = shared.again > 1;
    const float4* const from = place(index, again);
    if (thread() == 0) wait_for(cut.arrivals + index, 1 + again);
    sync_threads<kGroup>(barrier());
    __threadfence();
#pragma unroll
    for (int i = 0; i < K / 8; i++) {
      const float4 x = __ldcg(from + i * kGroup);
      state.s[4 * i] = x.x, state.s[4 * i + 1] = x.y, state.s[4 * i + 2] = x.z,
                  state.s[4 * i + 3] = x.w;
    }
  }
  __device__ __forceinline__ float4* place(int index, bool again) const {
    const long long all = again ? Item::count(a, cut) * S::kKeepers : 0;
    return reinterpret_cast<float4*>(cut.states) + (all + index) * (16 * K) + thread();
  }

  // Of the state that the next piece leaves out, for leaves_out_too_much.
  __device__ __forceinline__ void note_left_out() const {
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < K / 2; i++) sums[i / 2 % 2] += fabsf(state.s[i]);
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int step = 1; step < 4; step *= 2)
        sums[n] += __shfl_xor_sync(0xffffffffu, sums[n], step);
      shared.left_out[which][n][thread()] = sums[n];
    }
  }
  // Whether what may be left of it matters beside the state of this warp's columns.
  __device__ __forceinline__ bool leaves_out_too_much() const {
    if (shared.look < 0) return false;
    float largest = 0;
#pragma unroll
    for (int i = 0; i < K / 2; i++) largest = fmaxf(largest, fabsf(state.s[i]));
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    bool well = true;
#pragma unroll
    for (int n = 0; n < 2; n++)
      well &= shared.left_out[which][n][thread()] * exp2f(shared.left) <= kNegligible * largest;
    return !well;
  }

  // Whether an earlier piece has found that the one after it left out too much; then this one
  // begins again.
  __device__ __forceinline__ bool go_through_again() {
    if (shared.again) return false;
    if (which == 0 && thread() < 32) {
      const int index = now().index, piece = Item(a, cut, index).piece;
      bool any = false, before = false;  // before the piece before
#pragma unroll 1
      for (int e = thread(); e < piece * S::kKeepers; e += 32) {
        const int back = piece - e / S::kKeepers;
        const int from = (index - back * cut.column_blocks) * S::kKeepers + e % S::kKeepers;
        const bool marked = wait_for(cut.arrivals + from, 1);
        any |= marked, before |= marked && back > 1;
      }
      any = __any_sync(0xffffffffu, any), before = __any_sync(0xffffffffu, before);
      if (thread() == 0) shared.found = any + before, shared.done = at;
    }
    return once_more(shared);
  }
};
