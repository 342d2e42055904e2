// What the delta rule needs of a chunk before any state is known, made by a warpgroup of sm_90a:
//
//   inverse = (I + A)^-1,  A_ij = beta_i D_ij k_i . k_j for j < i
//   scores_ij = scale D_ij q_i . k_j for j <= i
//
// with D_ij = gate_{j+1} ... gate_i. The inverse is found by substitution, in float32 inside blocks
// of 16 x 16; from block to block products are of numbers with 8 bits, or 16 where keys are much
// alike. Where they are nearly the same, and what is once written may never be forgotten, 16 bits
// of an inverse that does not get smaller from its diagonal on are too few: A is handed on instead,
// and whoever keeps the state substitutes token by token. Warp r has the rows of block r. Warp 0,
// which has the shortest ones, weighs the tokens of the next chunk meanwhile.
#pragma once
#include "delta_feed_sm90.cuh"

constexpr float kStrained = 24;          // sum of squares of 16 rows of A, from which on they are
constexpr float kSame = .5f;             // mean square of A, from which on keys are nearly the same
constexpr float kMostSquares = 1 << 10;  // of a lane, that are counted
constexpr float kGrowing = 1.0005f;      // that a state may grow by in a token, beside its gate
constexpr float kStrainSteps = 1 << 10;  // of which sums of squares are counted

// Addresses are found anew wherever they are needed: they would take registers meanwhile.
template <class S, int kStages, bool kNormalise, Dealing kDealing>
struct Preparer {
  static constexpr bool kPieces = kDealing == kInPieces;
  Shared<S, kStages>& shared;
  const CallArgs& a;
  const DeltaPieceArgs& cut;
  unsigned group, r, lane;  // without a sign, so that quotients are shifts
  unsigned at;              // which chunk of the block; every kPreparers'th is this group's

  // Makes the tables of its chunks.
  __device__ __forceinline__ void walk(const Maps& maps) {
#pragma unroll 1
    for (;;) {
      fresh().begin();
#pragma unroll 1
      for (; fresh().cursor().index >= 0; at += S::kPreparers) {
        fresh().load(maps);
        const int left = fresh().left();
        fresh().move();
        const Fetched gate = fresh().fetch();
        fresh().wait_for_keys();
        fresh().clear_rest(left);
        fresh().make(gate, maps.v);
        fresh().hand_on();
      }
      fresh().store_last(maps.y);
      if (!kPieces || shared.again || !once_more(shared)) break;
    }
  }

 private:
  static constexpr unsigned kValueThread = 32;  // of a group: has v copied, and outputs
  static constexpr bool kScarce = S::kPrepareRegisters < 112;  // registers

  __device__ __forceinline__ void begin() const {
    const unsigned done = kPieces ? shared.done : 0;
    __syncwarp();
    if constexpr (kDealing == kByQueue)
      begin_queue();
    else if (lane == 0)
      set_cursor(cursor(), a, cut, warm(), at - done);
    __syncwarp();
    fresh().put_gate(fresh().fetch());
    meet();
    if (!kNormalise) {
      if (r == 0) fresh().weigh_tokens(at);
      meet();
    }
  }
  __device__ __forceinline__ int warm() const { return kPieces ? shared.warm_chunks : 0; }
  __device__ __forceinline__ Cursor& cursor() const { return shared.cursors[4 * group + r]; }
  __device__ __forceinline__ void move() const {
    __syncwarp();
    if constexpr (kDealing == kByQueue)
      move_in_queue(S::kPreparers);
    else if (lane == 0)
      advance(cursor(), a, cut, warm(), S::kPreparers);
    __syncwarp();
  }
  __device__ __forceinline__ void begin_queue() const {
    Cursor& to = cursor();
    if (lane == 0) to.ordinal = -1, to.index = 0, to.chunk = 0, to.chunks = 0;
    __syncwarp();
    move_in_queue(at);
  }
  __device__ __forceinline__ void move_in_queue(int chunks) const {
    Cursor& to = cursor();
    if (lane == 0) to.chunk += chunks;
    __syncwarp();
#pragma unroll 1
    while (to.index >= 0 && to.chunk >= to.chunks) {
      const int ordinal = to.ordinal + 1;
      if (r == 0) claim(shared, a, cut, ordinal, lane);
      const int index = item_from_queue(shared, ordinal);
      __syncwarp();
      if (lane == 0) {
        to.chunk -= to.chunks, to.ordinal = ordinal, to.index = index;
        if (index >= 0) open(to, a, cut, 0);
      }
      __syncwarp();
    }
  }
  // The same, of which the compiler does not know that: addresses are worked out anew, where they
  // would take registers meanwhile.
  __device__ __forceinline__ Preparer fresh() const {
    return {shared, a, cut, afresh(group), afresh(r), afresh(lane), afresh(at)};
  }
  // The same through a shuffle, which the assembler does not see through either, where registers
  // are fewest.
  __device__ __forceinline__ Preparer anew() const {
    Preparer same = fresh();
    if (kScarce) same.lane = __shfl_sync(0xffffffffu, lane, lane);
    return same;
  }
  __device__ __forceinline__ unsigned stage() const { return at % kStages; }
  __device__ __forceinline__ unsigned parity() const { return at / kStages % 2; }
  __device__ __forceinline__ PreparedChunk& to() const { return shared.tables[stage()]; }
  __device__ __forceinline__ Rests& rests() const { return shared.rests[at % S::kRests]; }
  __device__ __forceinline__ Strain& strain() const { return shared.strain[stage()]; }
  __device__ __forceinline__ TokenDecays& decays() const { return shared.decays[group]; }
  __device__ __forceinline__ TokenWeights& weights(unsigned chunk) const {
    return shared.weights[chunk % S::kWeights];
  }
  __device__ __forceinline__ unsigned short* queries() const { return shared.stages[stage()]; }
  __device__ __forceinline__ unsigned short* keys() const { return queries() + S::kQuery; }
  __device__ __forceinline__ unsigned short* values() const { return keys() + S::kQuery; }
  __device__ __forceinline__ void meet() const { sync_threads<kGroup>(group + 1); }
  // Until nobody reads those of the chunk before any longer, which lie at the same place.
  __device__ __forceinline__ void wait_for_rests() const {
    const unsigned before = at + 2 * kStages - S::kRests;
    shared.free[before % kStages].wait(before / kStages % 2);
  }

  __device__ __forceinline__ void hand_on() const { arrive(shared.prepared[stage()], lane); }
  // A gate or a beta of this group's next chunk.
  __device__ __forceinline__ Fetched fetch() const {
    Fetched gate;
    gate.fetch(a, cursor(), r, lane);
    return gate;
  }
  // To where the whole group finds it after meeting.
  __device__ __forceinline__ void put_gate(const Fetched& gate) const {
    float* const to = lane / 16 ? decays().beta : decays().gate;
    to[r * kBlock + lane % 16] = gate.value(a, lane);
  }
  // Has the chunk at the cursor copied, by a thread each of two warps, once nobody reads what was
  // there.
  __device__ __forceinline__ void load(const Maps& maps) const;
  __device__ __forceinline__ void load_keys(const Maps& maps) const;
  __device__ __forceinline__ void wait_for_keys() const { shared.loaded[stage()].wait(parity()); }
  // Sends off outputs of the chunk before, and notes where this one's belong.
  __device__ __forceinline__ void change_place(const TensorMap& y_map) const;
  // Once outputs have left that place, where the copy does not hold others up.
  __device__ __forceinline__ void load_values(const TensorMap& v_map) const;
  // Outputs of the chunk that was in the stage before.
  __device__ __forceinline__ void store(const TensorMap& y_map) const;
  // Those of chunks whose stages are not filled again.
  __device__ __forceinline__ void store_last(const TensorMap& y_map) const;
  // Tokens of the chunk at the cursor, and those of nothing that follow.
  __device__ __forceinline__ int left() const {
    const Cursor& at = cursor();
    return at.stop < a.T ? min(at.stop - at.token(), kChunk) : kChunk;
  }
  // Keys of the next sequence, which may be NaN.
  __device__ __forceinline__ void clear_rest(int left) const {
    if (__builtin_expect(left >= kChunk, 1)) return;
#pragma unroll 1
    for (int i = 0; i < S::kKeyTiles; i++)
#pragma unroll 1
      for (unsigned e = max(left, static_cast<int>(r) * kBlock) * 64 + lane;
           e < (r + 1) * (kBlock * 64); e += 32)
        keys()[i * kTile + e] = 0;
    fence_shared();
    meet();
  }

  // What makes queries and keys of unit length, to where weigh_tokens finds it.
  __device__ __forceinline__ void find_units() const;
  // Of one row, by two lanes.
  static __device__ __forceinline__ float unit_factor(const unsigned short* tiles, unsigned row,
                                                      unsigned odd);

  // By one warp, two tokens a lane.
  __device__ __forceinline__ void weigh_tokens(unsigned chunk) const;
  static __device__ __forceinline__ float bound(float x, bool wild) {
    return wild ? bounded(x) : x;
  }

  // If keys are much alike, all of it once more, with 16 bits of each number.
  __device__ __forceinline__ void make(const Fetched& gate, const TensorMap& v_map) const {
    float x[32];
    fresh().multiply_tiles(x, keys());
    fresh().load_values(v_map);
    if (kNormalise) {
      fresh().find_units();
      if (r == 0) fresh().weigh_tokens(at);
      meet();
    }
    const bool wild = weights(at).wild;
    wgmma_wait<0>();
    settle(x);
    const float squares = fresh().template weigh_row<true>(x);
    if (lane == 0) strain().rows[r] = wild ? kMuchAlike : 0;
    const int alike = how_much_alike(squares);
    if (!wild && lane == 0) strain().rows[r] = alike;
    if (kScarce) put_gate(gate);
    if (kPieces && static_cast<int>(at) < warm()) {  // nobody reads outputs
      fresh().invert_diagonal();
    } else {
      fresh().multiply_tiles(x, queries());
      fresh().invert_diagonal();
      wgmma_wait<0>();
      settle(x);
      anew().template weigh_row<false>(x);
    }
    if (!kScarce) put_gate(gate);
    meet();
    const int careful = strain().any();
    if (__builtin_expect(careful, 0)) fresh().make_blocks(careful & kNearlySame);
    if (!kNormalise && r == 0) fresh().weigh_tokens(at + S::kPreparers);
    if (__builtin_expect(careful == 0, 1))
      anew().complete();
    else if (!(careful & kNearlySame))
      fresh().complete_carefully(fresh().weights(at).wild);
    else if (kArriving > 1)  // warp 0 has keys copied after it has weighed; racecheck does not see
      meet();
    fence_shared();
  }

  // Once more, with what is rounded off; A itself where keys are nearly the same.
  __device__ __forceinline__ void make_blocks(bool exact) const {
    const bool wild = weights(at).wild;
    wait_for_rests();
    fresh().template make_row<true>(r, wild, exact);
    if (!exact) fresh().invert_carefully(wild);
    fresh().template make_row<false>(kBlocks - 1 - r, wild, exact);
    meet();
  }

  // x = the rows of tiles times keys, under way
  __device__ __forceinline__ void multiply_tiles(float (&x)[32], const unsigned short* rows) const {
    const unsigned long long left = factor(rows), right = factor(keys());
    wgmma_begin();
#pragma unroll
    for (int i = 0; i < S::kDim / 16; i++) {
      const int step = i / 4 * kTile + i % 4 * 16;
      wgmma<false>(x, later(left, step), later(right, step), i == 0);
    }
    wgmma_commit();
  }
  // This warp's row of blocks, of A (below the diagonal rounded, on it as it is; returns this
  // lane's sum of their squares) or of the scores, from products of its tokens. Nothing is kept
  // from overflow.
  template <bool kErrors>
  __device__ __forceinline__ float weigh_row(const float (&all)[32]) const;
  static __device__ __forceinline__ float sum_squares(const float (&x)[2][4]) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) squares += x[i / 4][i % 4] * x[i / 4][i % 4];
    return squares;
  }
  // Transposed.
  __device__ __forceinline__ void put_diagonal(const float (&x)[2][4], unsigned row) const {
    float* const block =
        reinterpret_cast<float*>(scratch(row)) + lane % 4 * (2 * kDiagonalRow) + lane / 4;
#pragma unroll
    for (int i = 0; i < 8; i++)
      block[(i / 4 * 8 + i % 2) * kDiagonalRow + i / 2 % 2 * 8] = x[i / 4][i % 4];
  }

  // While the inverse is being made, its place holds blocks of A on the diagonal, as float32
  // numbers and then inverted, and those below it.
  __device__ __forceinline__ unsigned short* scratch(unsigned row) const {
    return to().inverse + row * (2 * kBlock * kDiagonalRow);
  }
  __device__ __forceinline__ unsigned short* compact(unsigned row, unsigned c) const {
    return to().inverse + kBlocks * (2 * kBlock * kDiagonalRow) +
           (row * (row - 1) / 2 + c) * (kBlock * kBlock);
  }
  __device__ __forceinline__ void put_compact(unsigned short* block, const unsigned (&x)[4]) const {
    stmatrix_x4(block + 8 * lane, x[0], x[1], x[2], x[3]);
  }
  __device__ __forceinline__ void get_compact(unsigned (&x)[4], const unsigned short* block) const {
    ldmatrix_x4(x, block + 8 * lane);
  }
  // Where this lane's row of block (row, c) of a tile begins, for stmatrix.
  __device__ __forceinline__ int place(unsigned row, unsigned c) const {
    return row * (kBlock * 64) + swizzled(lane % 16, 2 * c + lane / 16);
  }
  __device__ __forceinline__ void put_block(unsigned short* tile, unsigned row, unsigned c,
                                            const unsigned (&x)[4]) const {
    stmatrix_x4(tile + place(row, c), x[0], x[1], x[2], x[3]);
  }

  // The same with what is rounded off, block by block.
  template <bool kErrors>
  __device__ __forceinline__ void make_row(unsigned row, bool wild, bool exact) const;
  // x = 16 rows times keys of block c
  __device__ __forceinline__ void multiply_block(float (&x)[2][4], const unsigned short* rows,
                                                 unsigned c) const;

  // Products of tokens of two blocks times what rows and columns are weighed with.
  template <bool kWild>
  static __device__ __forceinline__ void weigh(float (&x)[2][4], const float (&by)[2],
                                               const float* col);
  // The same inside a block. What lies above the diagonal may be anything, NaN too: it is not
  // multiplied away.
  template <bool kWild, bool kErrors>
  __device__ __forceinline__ void weigh_diagonal(float (&x)[2][4], unsigned row) const;
  // By the sum of squares of this warp's rows of A.
  __device__ __forceinline__ int how_much_alike(float squares) const {
    const int steps = static_cast<int>(fminf(squares, kMostSquares) * kStrainSteps);
    const int all = __reduce_add_sync(0xffffffffu, steps);
    const int numbers = kBlock * (kBlock - 1) / 2 + r * kBlock * kBlock;
    if (all > numbers * static_cast<int>(kSame * kStrainSteps)) return kNearlySame;
    return all > static_cast<int>(kStrained * kStrainSteps) ? kMuchAlike : 0;
  }

  // (I + A)^-1 of the block on the diagonal.
  __device__ __forceinline__ void invert_diagonal() const;
  // The same with what is rounded off.
  __device__ __forceinline__ void invert_carefully(bool wild) const;
  // Rounded, columns down, a column a lane, in place of float32 numbers.
  __device__ __forceinline__ void put_inverse(const float (&x)[kBlock]) const;
  // From float32 numbers, which may be overwritten then.
  __device__ __forceinline__ void get_inverse(float (&inverse)[2][4]) const;

  // A column a lane, from top to bottom.
  __device__ __forceinline__ void substitute(float (&x)[kBlock], const float* block) const;
  // The same in little code, each row in place of that of A; rows to come are passed on by one.
  __device__ __forceinline__ void substitute_carefully(float* block, bool wild) const;

  // From the diagonal to the left: T_rc = -(sum over c < m <= r of T_rm A_mc) T_cc, c = r - d.
  __device__ __forceinline__ void complete() const;
  // Where A was, which nobody may read any longer. Scratch has been where zeros belong.
  __device__ __forceinline__ void put_inverse(const unsigned (&t0)[4], const unsigned (&t1)[4],
                                              const unsigned (&t2)[4],
                                              const unsigned (&t3)[4]) const;
  // Block (row, c) as the right factor of mma, of rows of numbers.
  __device__ __forceinline__ void get(unsigned (&x)[4], unsigned row, unsigned c) const {
    ldmatrix_x4<true>(x, (c == row ? scratch(row) : compact(row, c)) + 8 * lane);
  }
  // sum += x A, A's block (r - e, c)
  __device__ __forceinline__ void add(float (&sum)[2][4], const unsigned (&x)[4], unsigned e,
                                      unsigned c) const;
  __device__ __forceinline__ void finish(unsigned (&t)[4], const float (&sum)[2][4], int d) const;

  // The same with 16 bits of each number.
  __device__ __forceinline__ void complete_carefully(bool wild) const;
  // A block's low bits to where others find them as a right factor.
  __device__ __forceinline__ void put_low(unsigned c, const unsigned (&x)[4]) const {
    unsigned b[4];
    left_as_right(b, x);
    rests().inverse[lower(r, c)][lane] = {b[0], b[1], b[2], b[3]};
  }
  // sum += x (block (r - e, c) of A, or of the inverse on the diagonal)
  __device__ __forceinline__ void add(float (&sum)[2][4], const Split& x, unsigned e, unsigned c,
                                      bool wild) const;
};
